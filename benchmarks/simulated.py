"""``thinwire train sgd+METHOD`` with all workers in one process: real gradients, bytes counted, no network."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
from thinwire.core.method import Method
from thinwire.workloads import Workload, load
from thinwire.workloads.trainee import TAIL, learning_rate


@dataclass(frozen=True)
class Run:
    """What came of a training."""

    val_loss: float
    """Mean over the models of the last ``ends`` steps."""
    train_loss: float
    """Mean over the workers and the last ``tail`` steps."""
    bytes_sent: int
    """By rank 0."""


def gradients(workload: Workload, step: int, workers: int) -> tuple[list[dict[str, Tensor]], float]:
    """Each worker's gradient on its own batch, and the mean of their losses."""
    found, losses = [], []
    for rank in range(workers):
        workload.model.zero_grad()
        loss = workload.loss(workload.model, step, rank, workers)
        loss.backward()
        found.append({name: p.grad for name, p in workload.model.named_parameters()})
        losses.append(loss.item())
    return found, statistics.fmean(losses)


def train(
    method: str | Method,
    spec: str,
    data: Path | None,
    seed: int,
    steps: int,
    lr: float,
    momentum: float = 0.9,
    workers: int = 4,
    decay: bool = True,
    tail: int = TAIL,
    ends: int = 1,
    watch: Callable[[tw.Simulation, list[dict[str, Tensor]]], None] = lambda sim, gradients: None,
) -> Run:
    """SGD with Nesterov momentum on the schedule of ``thinwire train``, or without ``decay`` at a constant rate.

    ``watch`` is shown the workers' gradients of each step before they are exchanged.
    """
    workload = load(spec, data, seed)
    model = workload.model
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum, nesterov=momentum > 0)
    sim = tw.Simulation(method, workers, seed)
    losses, validated = [], []
    for step in range(steps):
        rate = lr * learning_rate(step, steps) if decay else lr
        optimizer.param_groups[0]["lr"] = rate
        found, loss = gradients(workload, step, workers)
        losses.append(loss)
        watch(sim, found)
        mean = sim.reduce(found, rate)[0]
        for name, p in model.named_parameters():
            p.grad = mean[name]
        if workload.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        if step >= steps - ends:
            validated.append(workload.evaluate(model)["val_loss"])
    return Run(statistics.fmean(validated), statistics.fmean(losses[-tail:]), sim.bytes_sent)
