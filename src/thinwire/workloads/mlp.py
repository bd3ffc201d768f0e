"""A wide multi-layer perceptron that classifies images: matrices only, the best case for low rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from thinwire.workloads.common import check_range
from thinwire.workloads.image import CLASSES, ImageWorkload


@dataclass(frozen=True, kw_only=True)
class MlpOptions:
    """Classify the images of the image workload, pixel by pixel."""

    layers: int = 3
    """Hidden layers."""
    width: int = 1024
    """Units of each."""
    batch: int = 32
    """Images per worker and step."""

    def __post_init__(self) -> None:
        check_range("mlp", "layers", self.layers, 1, 64)
        check_range("mlp", "width", self.width, 1, 8192)
        check_range("mlp", "batch", self.batch, 1, 4096)

    def load(self, data: Path | None, seed: int) -> ImageWorkload:
        return ImageWorkload("mlp", self.network, self.batch, data, seed)

    def network(self, shape: torch.Size) -> nn.Sequential:
        hidden: list[nn.Module] = []
        for inputs, outputs in pairwise([shape.numel(), *[self.width] * self.layers]):
            linear = nn.Linear(inputs, outputs)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            hidden += [linear, nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(self.width, CLASSES))
