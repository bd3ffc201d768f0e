"""Several methods on one workload in the same processes, in turns.

``python -m thinwire.workloads.comparison PLAN`` is one worker of a comparison; ``thinwire compare`` starts them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.workloads import Workload, load
from thinwire.workloads.contestant import SETTLING, SMOOTH, TRACED, Contestant, Entry
from thinwire.workloads.optimizers import DEFAULT_OPTIMIZER

EVENT = "thinwire-event "
"""How a line of a worker's output begins that is meant for the program."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared, and how."""

    methods: list[str]
    workload: str = "lm"
    data: str | None = None
    steps: int = 40
    """Timed steps of a method in each of its turns."""
    repeats: int = 3
    """Turns that each method has."""
    lr: float | None = None
    seed: int = 0
    target_loss: float | None = None
    """Train each method to this loss, or for as many steps as its turns have."""
    messages: int | None = None
    """Into how many a step's exchange is cut by thinwire's methods; None lets each choose."""
    sharing: int = 1
    """Workers whose traffic is counted by one network interface."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("name at least one method to compare: see `thinwire methods`")
        for method in self.methods:
            if self.methods.count(method) > 1:
                raise ValueError(f"{method} is given twice")
        for name in ("steps", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.messages is not None and self.messages < 1:
            raise ValueError(f"messages must be at least 1, not {self.messages}")
        for name in ("lr", "target_loss"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, not {value}")

    @property
    def total(self) -> int:
        """Timed steps of each method."""
        return self.steps * self.repeats

    def prepare(self) -> tuple[Workload, list[Entry]]:
        """The workload and the methods; raises ``ValueError`` for whatever is wrong with them."""
        workload = load(self.workload, Path(self.data) if self.data else None, self.seed)
        return workload, [Entry.parse(method, DEFAULT_OPTIMIZER[workload.name]) for method in self.methods]


def compare(plan: Plan, emit: Emit) -> None:
    """Train every method in turns; rank 0 emits progress and, at the end, each method's figures.

    Every rank calls this in its process group.
    """
    workload, entries = plan.prepare()
    tw.Simulation("dist-ef-block", 2).reduce(
        [{"": torch.ones(64, 64)}] * 2
    )  # its kernels' compilation is nobody's step
    horizon = SETTLING + plan.total + TRACED
    contestants = []
    for entry in entries:
        trainee = entry.trainee(workload, plan.lr, plan.seed, horizon, plan.messages)
        contestants.append(Contestant(entry, trainee, plan.sharing))
        contestants[-1].train(SETTLING, lambda *_: None)
        emit({"ready": entry.name})
    # towards a target the turns are short, so that nobody trains on in vain
    turn = min(plan.steps, SMOOTH) if plan.target_loss is not None else plan.steps
    running, turns = list(contestants), 0
    while running:
        shift = turns % len(running)
        for one in [*running[shift:], *running[:shift]]:
            _take_turn(one, min(turn, plan.total - len(one.steps)), emit)
        turns += 1
        running = [one for one in running if not _done(one, plan)]
    for one in contestants:
        emit({"result": one.finish(plan.target_loss)})


def _take_turn(one: Contestant, steps: int, emit: Emit) -> None:
    def report(loss: float, seconds: float) -> None:
        emit({"step": one.entry.name, "loss": loss, "seconds": seconds})

    one.steps += one.train(steps, report)


def _done(one: Contestant, plan: Plan) -> bool:
    reached = plan.target_loss is not None and one.reached(plan.target_loss) is not None
    return reached or len(one.steps) >= plan.total


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # a model that has gone astray makes numbers so small that a processor is slow with them: no method's doing
    torch.set_flush_denormal(True)
    rank = int(os.environ["RANK"])

    def emit(event: dict[str, Any]) -> None:
        if rank == 0 or "error" in event:
            print(EVENT + json.dumps(event), flush=True)

    try:
        dist.init_process_group("gloo")
        compare(Plan(**json.loads(sys.argv[1])), emit)
        dist.destroy_process_group()
    except Exception as error:
        emit({"error": f"rank {rank}: {error}" if str(error) else f"rank {rank}: {type(error).__name__}"})
        os._exit(1)  # a failed group may hold threads that wait for a peer


if __name__ == "__main__":
    main()
