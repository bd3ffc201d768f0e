"""Models and data to train on from the command line and in benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from thinwire import spec as grammar
from thinwire.workloads.image import ImageOptions
from thinwire.workloads.lm import LmOptions
from thinwire.workloads.mlp import MlpOptions

__all__ = ["WORKLOADS", "Workload", "load"]


class Workload(Protocol):
    """A model with its training loss and its validation."""

    name: str
    model: nn.Module
    """Initialised from the seed alone, hence identical in every process."""

    clip: float
    """Largest norm of the averaged gradient; 0 for no limit."""

    def loss(self, model: nn.Module, step: int, rank: int, world: int) -> Tensor:
        """The training loss of this rank's batch at this step, a function of its arguments alone."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Validation figures of ``model``, which is left as it was."""
        ...


Options = LmOptions | ImageOptions | MlpOptions

WORKLOADS: dict[str, type[Options]] = {"lm": LmOptions, "image": ImageOptions, "mlp": MlpOptions}
"""The options of every workload by its name."""


def load(spec: str, data: Path | None, seed: int) -> Workload:
    """The workload that ``spec`` names, such as ``"lm:layers=4,width=384"``.

    Without ``data`` every workload brings its own. Bad options or data raise ``ValueError``.
    """
    if seed < 0:
        raise ValueError(f"seed={seed} is out of range: it must be at least 0")
    name, options = grammar.split(spec)
    kind = WORKLOADS[grammar.choose("workload", name, WORKLOADS)]
    recipe: Options = grammar.build(kind, name, options)
    return recipe.load(data, seed)
