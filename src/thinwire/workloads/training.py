"""Train a workload by a method in this process, one of the group's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.runtime.telemetry import Counters
from thinwire.runtime.trace import write_trace
from thinwire.workloads import Workload, checkpoint, load
from thinwire.workloads.optimizers import DEFAULT_OPTIMIZER, Recipe
from thinwire.workloads.trainee import TAIL, Trainee, breakdown

TRACED_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train, and how."""

    method: str
    workload: str = "lm"
    data: Path | None = None
    steps: int = 200
    lr: float | None = None
    seed: int = 0
    messages: int | None = None
    save: Path | None = None
    save_every: int = 100
    resume: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if self.save_every < 1:
            raise ValueError(f"save_every must be at least 1, not {self.save_every}")
        if self.messages is not None and self.messages < 1:
            raise ValueError(f"messages must be at least 1, not {self.messages}")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0, not {self.lr}")

    def prepare(self) -> tuple[Workload, Recipe]:
        """The workload and the method; raises ``ValueError`` for whatever is wrong with them."""
        workload = load(self.workload, self.data, self.seed)
        if self.resume:
            checkpoint.load(self.resume, 0)
        return workload, Recipe.parse(self.method, DEFAULT_OPTIMIZER[workload.name])


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    loss: float
    bytes_sent: int


def train(settings: Settings, report: Callable[[Progress], None]) -> dict[str, Any]:
    """Run to the end and return the figures. Every rank calls this in its process group."""
    workload, recipe = settings.prepare()
    rank, world = dist.get_rank(), dist.get_world_size()
    trainee = Trainee.attached(
        workload, workload.model, recipe, settings.lr, settings.seed, settings.steps, settings.messages
    )
    counters = trainee.telemetry.counters
    first = _resume(settings, trainee) if settings.resume else 0
    losses: list[float] = []
    seconds: list[float] = []
    sent = [0]
    for step in range(first, settings.steps):
        trainee.telemetry.tracing = settings.trace is not None and step >= settings.steps - TRACED_STEPS
        start = time.perf_counter()
        losses.append(trainee.step(step, rank, world))
        seconds.append(time.perf_counter() - start)
        sent.append(counters.bytes_sent)
        report(Progress(step + 1, losses[-1], lately(sent, trainee.period)))
        done = step + 1
        if settings.save and (done % settings.save_every == 0 or done == settings.steps):
            checkpoint.save(settings.save, done, _content(settings, done, trainee))
    if settings.trace:
        write_trace(settings.trace, trainee.telemetry.spans)
    figures = _figures(counters, losses, seconds, trainee.period)
    figures["bytes_last_step"] = lately(sent, trainee.period)
    model = trainee.finish()
    figures |= workload.evaluate(model) if rank == 0 else {}
    figures["warm_up_over"] = getattr(trainee.optimizer, "frozen", True)
    dist.barrier()
    described = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
    parameters = sum(p.numel() for p in trainee.module.parameters())
    return described | {"workers": world, "parameters": parameters} | figures


def lately(sent: list[int], period: int) -> int:
    """Bytes a step over the last two periods, since some methods alternate; from running sums."""
    steps = max(1, min(2 * period, len(sent) - 1))
    return (sent[-1] - sent[-1 - steps]) // steps if len(sent) > 1 else 0


def _figures(counters: Counters, losses: list[float], seconds: list[float], period: int) -> dict[str, Any]:
    """Per step, of this rank."""
    steps = max(1, len(losses))
    return {
        "train_loss": statistics.fmean(losses[-TAIL:]) if losses else None,
        "losses": losses,
        "bytes_per_step": counters.bytes_sent / steps,
        "dense_bytes_per_step": counters.bytes_dense / steps,
        "collectives_per_step": counters.collectives / steps,
        **breakdown(seconds, counters.seconds_waiting, counters.seconds_exposed, counters.seconds_compressing, period),
    }


def _content(settings: Settings, step: int, trainee: Trainee) -> dict[str, Any]:
    assert trainee.sync is not None
    return {
        "run": {"method": settings.method, "workload": settings.workload, "seed": settings.seed},
        "step": step,
        "model": trainee.module.state_dict(),
        "optimizer": trainee.optimizer.state_dict(),
        "schedule": trainee.schedule.state_dict(),
        "sync": trainee.sync.state_dict(),
    }


def _resume(settings: Settings, trainee: Trainee) -> int:
    """Load the latest checkpoint; return the step to go on from."""
    assert settings.resume is not None and trainee.sync is not None
    content, files = checkpoint.load(settings.resume, dist.get_rank())
    for name, saved in content.get("run", {}).items():
        if saved != getattr(settings, name):
            raise ValueError(f"the checkpoint is of {name} {saved!r}, this run of {getattr(settings, name)!r}")
    contents = [content] if len(files) == dist.get_world_size() else [checkpoint.read(file) for file in files]
    try:
        trainee.sync.load_state_dict([one["sync"] for one in contents])
        trainee.module.load_state_dict(_mean([one["model"] for one in contents]))
        trainee.optimizer.load_state_dict(content["optimizer"])
        trainee.schedule.load_state_dict(content["schedule"])
        step: int = content["step"]
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"the checkpoint in {settings.resume} does not fit: {error}") from None
    return step


def _mean(models: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of the workers' models, where they differ: as they do between averages, and always under gossip."""
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    return {
        name: tensors[0] if (tensors == tensors[0]).all() or not tensors.is_floating_point() else tensors.mean(0)
        for name, tensors in stacked.items()
    }
