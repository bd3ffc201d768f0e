"""A model in training: one step at a time, with what it took."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.optim import Gossip, SlowMo
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
        cls,
        workload: Workload,
        model: nn.Module,
        recipe: Recipe,
        lr: float | None,
        seed: int,
        steps: int,
        messages: int | None = None,
    ) -> Trainee:
        """One whose gradients ``recipe`` exchanges, in ``messages`` a step if that is given. Every rank calls this."""
        optimizer, method = recipe.build(model.parameters(), lr, workload.clip)
        sync = tw.attach(model, method, None if method is optimizer else optimizer, seed, messages)
        trainee = cls(workload, model, optimizer, sync.telemetry, steps)
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

        def evaluate() -> Tensor:
            with self._span("forward"):
                loss = self.workload.loss(self.model, step, rank, world)
            with self._span("backward"):
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            return loss

        if getattr(self.optimizer, "needs_closure", False):
            with self._span("optimizer"):
                loss: Tensor = self.optimizer.step(evaluate)  # type: ignore[assignment, arg-type]
                self.schedule.step()
            return loss.item()
        loss = evaluate()
        with self._span("optimizer"):
            if self._limit:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._limit)
            self.optimizer.step()
            self.schedule.step()
        return loss.item()

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return getattr(self.optimizer, "period", 1)

    def finish(self) -> nn.Module:
        """The model to evaluate, the same on every rank. Every rank calls this."""
        if isinstance(self.optimizer, SlowMo | Gossip):
            self.optimizer.meet()
        return self.module

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.telemetry.span("compute", name, start, time.perf_counter())


def evened(seconds: Sequence[float], period: int) -> list[float]:
    """The mean step of each ``period`` steps, of which one communicates; a rest that is no whole period is left out."""
    whole = len(seconds) // period * period
    return [statistics.fmean(seconds[i : i + period]) for i in range(0, whole, period)] or [statistics.fmean(seconds)]


def breakdown(
    seconds: Sequence[float], waiting: float, exposed: float, compressing: float, period: int = 1
) -> dict[str, float]:
    """The median step in ms, divided as all the steps of ``seconds`` together were."""
    step_ms, total = 1e3 * statistics.median(evened(seconds, period)) if seconds else 0.0, sum(seconds) or 1.0
    waiting, exposed, compressing = (step_ms * min(1.0, part / total) for part in (waiting, exposed, compressing))
    return {
        "step_ms": step_ms,
        "compute_ms": step_ms - waiting,
        "compress_ms": waiting - exposed,
        "exposed_ms": exposed,
        "hidden_compress_ms": max(0.0, compressing - (waiting - exposed)),
    }
