"""Train a workload by a method in this process, one of the group's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.core.combine import Nesterov
from thinwire.runtime.synchronizer import Synchronizer
from thinwire.runtime.telemetry import Telemetry
from thinwire.runtime.trace import write_trace
from thinwire.workloads import Workload, checkpoint, load
from thinwire.workloads.optimizers import Recipe

DEFAULT_OPTIMIZER = {"lm": "adam", "image": "sgd", "mlp": "sgd"}
TRACED_STEPS = 5
TAIL = 20
"""Steps over which the final training loss is averaged."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to train, and how."""

    method: str
    workload: str = "lm"
    data: Path | None = None
    steps: int = 200
    lr: float | None = None
    seed: int = 0
    save: Path | None = None
    save_every: int = 100
    resume: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps}")
        if self.save_every < 1:
            raise ValueError(f"save_every must be at least 1, not {self.save_every}")
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


def learning_rate(step: int, steps: int) -> float:
    """The schedule as a factor: a linear rise over the first tenth, then a cosine down to a tenth."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(settings: Settings, report: Callable[[Progress], None]) -> dict[str, Any]:
    """Run to the end and return the figures. Every rank calls this in its process group."""
    workload, recipe = settings.prepare()
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.model)
    optimizer, method = recipe.build(model.parameters(), settings.lr)
    sync = tw.attach(model, method, optimizer=None if method is optimizer else optimizer, seed=settings.seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, settings.steps))
    first = _resume(settings, model, optimizer, schedule, sync) if settings.resume else 0
    # where the workers' momentum is exchanged, it may be 1 / (1 - mu) times as long as a gradient
    limit = workload.clip / (1 - (sync.method.mu if isinstance(sync.method, Nesterov) else 0.0))
    losses: list[float] = []
    seconds: list[float] = []
    sent_before = last_sent = 0
    for step in range(first, settings.steps):
        sync.telemetry.tracing = settings.trace is not None and step >= settings.steps - TRACED_STEPS
        start = time.perf_counter()
        with _span(sync.telemetry, "forward"):
            loss = workload.loss(model, step, rank, world)
        with _span(sync.telemetry, "backward"):
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        with _span(sync.telemetry, "optimizer"):
            if limit:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        sent = sync.telemetry.counters.bytes_sent
        report(Progress(step + 1, losses[-1], sent - sent_before))
        last_sent, sent_before = sent - sent_before, sent
        done = step + 1
        if settings.save and (done % settings.save_every == 0 or done == settings.steps):
            content = _content(settings, done, model, optimizer, schedule, sync)
            checkpoint.save(settings.save, done, content)
    if settings.trace:
        write_trace(settings.trace, sync.telemetry.spans)
    figures = _figures(sync, losses, seconds)
    figures["bytes_last_step"] = last_sent
    figures |= workload.evaluate(model.module) if rank == 0 else {}
    figures["warm_up_over"] = getattr(optimizer, "frozen", True)
    dist.barrier()
    described = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(settings).items()}
    parameters = sum(p.numel() for p in model.parameters())
    return described | {"workers": world, "parameters": parameters} | figures


def _figures(sync: Synchronizer, losses: list[float], seconds: list[float]) -> dict[str, Any]:
    """Per step; times are medians and means over the run, of this rank."""
    stats, steps = sync.stats(), max(1, len(losses))
    step_ms = 1e3 * statistics.median(seconds) if seconds else 0.0
    waiting_ms, exposed_ms = 1e3 * stats["seconds_waiting"] / steps, 1e3 * stats["seconds_exposed"] / steps
    return {
        "train_loss": statistics.fmean(losses[-TAIL:]) if losses else None,
        "losses": losses,
        "bytes_per_step": stats["bytes_sent"] / steps,
        "dense_bytes_per_step": stats["bytes_dense"] / steps,
        "collectives_per_step": stats["collectives"] / steps,
        "step_ms": step_ms,
        "compute_ms": max(0.0, step_ms - waiting_ms),
        "compress_ms": waiting_ms - exposed_ms,
        "exposed_ms": exposed_ms,
        "hidden_compress_ms": 1e3 * stats["seconds_compressing"] / steps - (waiting_ms - exposed_ms),
    }


def _content(settings: Settings, step: int, model: Any, optimizer: Any, schedule: Any, sync: Any) -> dict[str, Any]:
    return {
        "run": {"method": settings.method, "workload": settings.workload, "seed": settings.seed},
        "step": step,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "sync": sync.state_dict(),
    }


def _resume(settings: Settings, model: Any, optimizer: Any, schedule: Any, sync: Any) -> int:
    """Load the latest checkpoint; return the step to go on from."""
    assert settings.resume is not None
    content, files = checkpoint.load(settings.resume, dist.get_rank())
    for name, saved in content.get("run", {}).items():
        if saved != getattr(settings, name):
            raise ValueError(f"the checkpoint is of {name} {saved!r}, this run of {getattr(settings, name)!r}")
    same = len(files) == dist.get_world_size()
    try:
        sync.load_state_dict(content["sync"] if same else [checkpoint.read(file)["sync"] for file in files])
        model.module.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        schedule.load_state_dict(content["schedule"])
        step: int = content["step"]
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"the checkpoint in {settings.resume} does not fit: {error}") from None
    return step


@contextmanager
def _span(telemetry: Telemetry, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    telemetry.span("compute", name, start, time.perf_counter())
