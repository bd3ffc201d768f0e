"""One method's part in a comparison: its training, step by step, and the figures that come of it."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire import registry
from thinwire import spec as grammar
from thinwire.optim import OPTIMIZERS
from thinwire.runtime.telemetry import Telemetry
from thinwire.workloads import Workload
from thinwire.workloads.baselines import BASELINES, Baseline
from thinwire.workloads.optimizers import BASES, Recipe
from thinwire.workloads.trainee import TAIL, Trainee, breakdown, evened
from thinwire.workloads.wire import counter, quiet_counter

SETTLING = 3
"""First steps that are trained but not timed: DDP cuts its buckets anew, kernels are compiled."""
TRACED = 4
"""Last steps, not timed, from which one is taken for the timeline."""
SMOOTH = 10
"""Steps over which a training loss is averaged before it is compared with a target."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a method's name stands for: a baseline, or a recipe of thinwire's."""

    name: str
    recipe: Recipe
    baseline: Baseline | None

    @classmethod
    def parse(cls, text: str, default_optimizer: str) -> Entry:
        """As ``thinwire train`` takes it, and the baselines, alone or as ``optimizer+baseline``."""
        head, plus, tail = text.rpartition("+")
        name, options = grammar.split(tail)
        if name in BASELINES:
            if plus:  # an optimizer that owns its exchange has no use for a baseline's
                grammar.choose("optimizer of a baseline", grammar.split(head)[0], BASES)
            recipe = Recipe.parse(f"{head or default_optimizer}+dense", default_optimizer)
            return cls(text, recipe, grammar.build(BASELINES[name], name, options))
        if not plus:
            grammar.choose("method", name, [*BASELINES, *registry.METHODS, *BASES, *OPTIMIZERS])
        return cls(text, Recipe.parse(text, default_optimizer), None)

    def trainee(
        self, workload: Workload, lr: float | None, seed: int, steps: int, messages: int | None = None
    ) -> Trainee:
        """A copy of the workload's model, ready for its first step. Every rank calls this."""
        model = copy.deepcopy(workload.model)
        if self.baseline is None:
            return Trainee.attached(workload, model, self.recipe, lr, seed, steps, messages)
        telemetry = Telemetry()
        wrapped = self.baseline.wrap(model, telemetry)
        optimizer, _ = self.recipe.build(wrapped.parameters(), lr)
        return Trainee(workload, wrapped, optimizer, telemetry, steps)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step took and gave; loss, seconds and wire bytes are means over the workers, the rest this worker's.

    Workers that wait for each other take the same time. Of those that train alone, one may have more of the machine.
    """

    loss: float
    seconds: float
    wire: float
    sent: int
    dense: int
    waiting: float
    exposed: float
    compressing: float


class Contestant:
    """A trainee that keeps a record of its steps."""

    def __init__(self, entry: Entry, trainee: Trainee, sharing: int) -> None:
        """``sharing``: workers whose traffic the network interface counts together."""
        self.entry = entry
        self.steps: list[Step] = []
        self._trainee = trainee
        self._sharing = sharing
        self._at = 0

    def train(self, steps: int, report: Callable[[float, float], None]) -> list[Step]:
        """Take some steps while nobody else communicates; ``report`` gets the loss and the time of each."""
        rank, world, counters = dist.get_rank(), dist.get_world_size(), self._trainee.telemetry.counters
        rows, wire = [], quiet_counter()
        for left in reversed(range(steps)):
            before, start = copy.copy(counters), time.perf_counter()
            loss = self._trainee.step(self._at, rank, world)
            seconds = time.perf_counter() - start
            now = counter() if left else quiet_counter()
            rows.append((loss, seconds, (now - wire) / self._sharing, before, copy.copy(counters)))
            wire = now
            self._at += 1
            report(loss, seconds)
        shared = torch.tensor([row[:3] for row in rows], dtype=torch.float64)
        dist.all_reduce(shared)
        return [
            Step(
                loss / world,
                seconds / world,
                wire / world,
                now.bytes_sent - before.bytes_sent,
                now.bytes_dense - before.bytes_dense,
                now.seconds_waiting - before.seconds_waiting,
                now.seconds_exposed - before.seconds_exposed,
                now.seconds_compressing - before.seconds_compressing,
            )
            for (loss, seconds, wire), (*_, before, now) in zip(shared.tolist(), rows, strict=True)
        ]

    def reached(self, target: float) -> int | None:
        """The number of steps after which the smoothed loss is at the target, if it ever is."""
        losses = [step.loss for step in self.steps]
        for end in range(SMOOTH, len(losses) + 1):
            if statistics.fmean(losses[end - SMOOTH : end]) <= target:
                return end
        return None

    def finish(self, target: float | None) -> dict[str, Any]:
        """The figures of the whole run, with a validation and the timeline of a last step."""
        trainee = self._trainee
        trainee.telemetry.tracing = True
        self.train(TRACED, lambda *_: None)
        trainee.telemetry.tracing = False
        model = trainee.finish()
        figures = trainee.workload.evaluate(model) if dist.get_rank() == 0 else {}
        dist.barrier()
        return figures | self._figures(target) | {"timeline": _timeline(trainee.telemetry)}

    def _figures(self, target: float | None) -> dict[str, Any]:
        warm = self._warm_up()
        timed = self.steps[warm:]
        period = self._trainee.period
        waiting, exposed, compressing = (
            sum(getattr(s, k) for s in timed) for k in ("waiting", "exposed", "compressing")
        )
        seconds = evened([s.seconds for s in timed], period)
        figures: dict[str, Any] = {
            "method": self.entry.name,
            **breakdown([s.seconds for s in timed], waiting, exposed, compressing, period),
            "step_ms_p10": 1e3 * _quantile(seconds, 0.1),
            "step_ms_p90": 1e3 * _quantile(seconds, 0.9),
            "wire_bytes_per_step": statistics.fmean(s.wire for s in timed),
            "payload_bytes_per_step": statistics.fmean(s.sent for s in timed),
            "train_loss": statistics.fmean(s.loss for s in self.steps[-TAIL:]),
            "warmup_over": getattr(self._trainee.optimizer, "frozen", True),
            "warmup_steps": warm,
            "warmup_step_ms": 1e3 * statistics.median(s.seconds for s in self.steps[:warm]) if warm else None,
            "mean_step_ms": 1e3 * statistics.fmean(s.seconds for s in self.steps),
            "losses": [s.loss for s in self.steps],
            "seconds": _running([s.seconds for s in self.steps]),
            "bytes": _running([s.sent for s in self.steps]),
        }
        if target is not None:
            end = self.reached(target)
            figures["target_steps"] = end
            figures["target_seconds"] = figures["seconds"][end - 1] if end else None
            figures["target_bytes"] = figures["bytes"][end - 1] if end else None
        return figures

    def _warm_up(self) -> int:
        """Leading steps that sent as much as dense ones, if any step sent less."""
        for number in range(0, len(self.steps), self._trainee.period):
            steps = self.steps[number : number + self._trainee.period]
            if sum(step.sent for step in steps) < sum(step.dense for step in steps):
                return number
        return 0


def _timeline(telemetry: Telemetry) -> list[dict[str, Any]]:
    """The spans of a traced step of middling length, in ms from its start."""
    computed = [span for span in telemetry.spans if span.track == "compute"]
    # the last one is left out: DDP tells of a step when the next begins
    ends = sorted(span.end for span in computed if span.name == "optimizer")
    begun = [span.start for span in computed if span.name in ("forward", "optimizer")]
    starts = [min(start for start in begun if start > last) for last in [-math.inf, *ends[:-1]]]
    whole = list(zip(starts, ends, strict=True))[:-1]
    start, end = sorted(whole, key=lambda step: step[1] - step[0])[len(whole) // 2]
    return [
        {"lane": s.track, "name": s.name, "start": 1e3 * (s.start - start), "end": 1e3 * (s.end - start)} | s.args
        for s in sorted(telemetry.spans, key=lambda s: s.start)
        if start <= s.start < end
    ]


def _running(values: Sequence[float]) -> list[float]:
    total, sums = 0.0, []
    for value in values:
        total += value
        sums.append(total)
    return sums


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]
