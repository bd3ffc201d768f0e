"""A small residual network that classifies images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.workloads import glyphs
from thinwire.workloads.common import batch_generator, check_range, device_of, evaluating, evenly, seeded
from thinwire.workloads.image_files import read_images

CLASSES = 10
SYNTHETIC_TRAINING, SYNTHETIC_VALIDATION = 10_000, 2_000
EVALUATION_IMAGES = 5_000
EVALUATION_BATCH = 250


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Classify images into ten classes.

    The data is a directory with the files of MNIST or CIFAR-10, else a synthetic set of drawn digits.
    """

    width: int = 16
    """Channels of the first convolution; the three stages have 2, 4 and 8 times as many."""
    blocks: int = 1
    """Residual blocks per stage."""
    batch: int = 32
    """Images per worker and step."""

    def __post_init__(self) -> None:
        check_range("image", "width", self.width, 1, 256)
        check_range("image", "blocks", self.blocks, 1, 32)
        # A batch of one would leave batch normalisation with little to normalise by.
        check_range("image", "batch", self.batch, 2, 4096)

    def load(self, data: Path | None, seed: int) -> ImageWorkload:
        return ImageWorkload("image", lambda shape: residual_network(shape[0], self), self.batch, data, seed)


class Block(nn.Module):
    """Two convolutions around which the input is carried."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(inputs, outputs, stride=stride)
        self.second = _conv(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.carry = nn.Identity() if same else _conv(inputs, outputs, size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.carry(x))


def _conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def residual_network(channels: int, options: ImageOptions) -> nn.Sequential:
    width = options.width
    layers: list[nn.Module] = [_conv(channels, width), nn.ReLU()]
    for stage in range(3):
        for block in range(options.blocks):
            outputs = options.width * 2 ** (stage + 1)
            layers.append(Block(width, outputs, stride=1 if block else 2))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class ImageWorkload:
    """A network on labelled images; the test set is for validation."""

    clip = 0.0

    def __init__(
        self, name: str, network: Callable[[torch.Size], nn.Module], batch: int, data: Path | None, seed: int
    ) -> None:
        """``network`` makes the model for images of a shape (channels, height, width)."""
        self.name = name
        self.batch = batch
        self.seed = seed
        if data is None:
            # Fixed seeds: the data is the same whichever seed the run has.
            training, validation = glyphs.draw(SYNTHETIC_TRAINING, 1), glyphs.draw(SYNTHETIC_VALIDATION, 2)
        else:
            training, validation = read_images(data)
        self.images, self.labels = training
        kept = evenly(len(validation[1]), EVALUATION_IMAGES)
        self.validation_images, self.validation_labels = validation[0][kept], validation[1][kept]
        # A part of the images tells the statistics well enough and spares memory.
        sample = self.images[evenly(len(self.images), 10_000)].float()
        self.std, self.mean = torch.std_mean(sample, dim=(0, 2, 3), keepdim=True)
        with seeded(seed):
            self.model = network(self.images.shape[1:])

    def loss(self, model: nn.Module, step: int, rank: int, world: int) -> Tensor:
        images, labels = self.drawn(step, rank)
        device = device_of(model)
        logits: Tensor = model(self._normalised(images).to(device))
        return F.cross_entropy(logits, labels.to(device))

    def drawn(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """The rank's batch: uint8 images and their labels."""
        generator = batch_generator(self.seed, step, rank)
        chosen = torch.randint(len(self.labels), (self.batch,), generator=generator)
        return self.images[chosen], self.labels[chosen]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = device_of(model)
        with evaluating(model):
            parts = torch.split(self.validation_images, EVALUATION_BATCH)
            logits = torch.cat([model(self._normalised(part).to(device)).cpu() for part in parts])
        right = logits.argmax(dim=1) == self.validation_labels
        return {
            "val_loss": F.cross_entropy(logits, self.validation_labels).item(),
            "val_accuracy": right.float().mean().item(),
        }

    def _normalised(self, images: Tensor) -> Tensor:
        # A channel that never varies has no spread to divide by.
        return (images - self.mean) / self.std.clamp_min(1.0)
