"""What the workloads share: seeding, option checks, file reading and evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


def check_range(workload: str, option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{workload}: option {option}={value} is out of range: {low} to {high}")


def batch_generator(seed: int, step: int, rank: int) -> torch.Generator:
    """A generator that depends on nothing but its arguments, so a resumed run draws the same batches."""
    mixed = np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from ``seed`` inside and leave the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule is back in its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def evenly(count: int, limit: int) -> Tensor:
    """At most ``limit`` of the indices below ``count``, evenly spread."""
    kept = min(count, limit)
    return torch.arange(kept) * count // kept


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
