"""A model in training: one step at a time, with what it took."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.runtime.synchronizer import Synchronizer
from thinwire.runtime.telemetry import Telemetry
from thinwire.workloads import Workload
from thinwire.workloads.optimizers import Recipe

TAIL = 20
"""Steps over which the final training loss is averaged."""


def learning_rate(step: int, steps: int) -> float:
    """The schedule as a factor: a linear rise over the first tenth, then a cosine down to a tenth."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class Trainee:
    """A model with its optimizer and schedule, in this process, one of the group's."""

    def __init__(
        self, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, telemetry: Telemetry, steps: int
    ) -> None:
        """``model`` exchanges its gradients by itself, and is metered by ``telemetry``."""
        self.workload = workload
        self.model = model
        self.optimizer = optimizer
        self.telemetry = telemetry
        self.sync: Synchronizer | None = None
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
        self._limit = workload.clip

    @classmethod
    def attached(
        cls, workload: Workload, model: nn.Module, recipe: Recipe, lr: float | None, seed: int, steps: int
    ) -> Trainee:
        """One whose gradients ``recipe`` exchanges. Every rank calls this."""
        ddp = DistributedDataParallel(model)
        optimizer, method = recipe.build(ddp.parameters(), lr, workload.clip)
        sync = tw.attach(ddp, method, optimizer=None if method is optimizer else optimizer, seed=seed)
        trainee = cls(workload, ddp, optimizer, sync.telemetry, steps)
        trainee.sync = sync
        if recipe.clips:
            trainee._limit = 0.0
        return trainee

    @property
    def module(self) -> nn.Module:
        """The model itself, without what exchanges its gradients."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def step(self, step: int, rank: int, world: int) -> float:
        """Train on this rank's batch of ``step``; its loss."""
        with self._span("forward"):
            loss = self.workload.loss(self.model, step, rank, world)
        with self._span("backward"):
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        with self._span("optimizer"):
            if self._limit:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._limit)
            self.optimizer.step()
            self.schedule.step()
        return loss.item()

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.telemetry.span("compute", name, start, time.perf_counter())


def breakdown(seconds: Sequence[float], waiting: float, exposed: float, compressing: float) -> dict[str, float]:
    """The median step in ms, divided as all the steps of ``seconds`` together were."""
    step_ms, total = 1e3 * statistics.median(seconds) if seconds else 0.0, sum(seconds) or 1.0
    waiting, exposed, compressing = (step_ms * min(1.0, part / total) for part in (waiting, exposed, compressing))
    return {
        "step_ms": step_ms,
        "compute_ms": step_ms - waiting,
        "compress_ms": waiting - exposed,
        "exposed_ms": exposed,
        "hidden_compress_ms": max(0.0, compressing - (waiting - exposed)),
    }
