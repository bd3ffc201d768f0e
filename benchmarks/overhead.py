"""What the engine itself costs on a model of many small layers, with no communication at all.

    python -m benchmarks.overhead [--workload image:blocks=9] [--steps 10]

One process trains with each method as if it were one of 4 workers; every collective is answered at once with
what this worker sent. Figures are processor time as a share of the process's in the same steps: that of the engine's
thread and of the hooks in backward, of which the compiled loops read and write the numbers themselves; the rest is the
engine's own, Python, queue and packing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from numba.core.dispatcher import Dispatcher
from torch import Tensor

import thinwire as tw
from thinwire.core.lockstep import Collective
from thinwire.kernels.cpu import factors, orthogonal, settling, signs
from thinwire.runtime.backward import Backward
from thinwire.runtime.synchronizer import Synchronizer
from thinwire.workloads import Workload, load

METHODS = ["dense", "acp:rank=4", "powersgd:rank=4", "dist-ef-block", "dist-ef-block:momentum=0.9"]
WARM_UP = 3
MOST = 0.05


@dataclass(frozen=True, slots=True)
class Answered:
    """A collective that took no time."""

    answer: Tensor

    def when_done(self, notify: Callable[[], None]) -> None:
        notify()

    def result(self) -> Tensor:
        return self.answer


class Alone:
    """In place of ``Transport``: all workers send what this one does."""

    rank, world, share = 0, 4, 1.0

    def __init__(self, group: Any, device: torch.device) -> None:
        self.device = device

    def start(self, collective: Collective) -> Answered:
        buffer = collective.buffer
        return Answered(torch.stack([buffer] * self.world) if collective.op == "all_gather" else buffer)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        pass

    def gather_objects(self, mine: Any) -> list[Any]:
        return [mine] * self.world

    def close(self) -> None:
        pass


class Clock:
    """Adds up the time that compiled loops take on their thread."""

    spent = 0.0

    def __init__(self, loop: Callable[..., Any]) -> None:
        self.loop = loop

    def __call__(self, *args: Any) -> Any:
        start = time.thread_time()
        answer = self.loop(*args)
        Clock.spent += time.thread_time() - start
        return answer


def clocked(*modules: ModuleType) -> None:
    """Have the compiled loops of these modules clocked where Python calls them; compiled code calls them as before."""
    for module in modules:
        for name, loop in vars(module).copy().items():
            if isinstance(loop, Dispatcher) and name.endswith(("_each", "_each_sum")):
                setattr(module, name, Clock(loop))


def share(workload: Workload, method: str, steps: int) -> tuple[float, float, float]:
    """Of the process's time, medians over the steps: the engine's, the compiled loops' in it, and the rest."""
    model, hooks, arrive = workload.model, [0.0], Backward._arrive

    def clocked_arrive(self: Backward, number: int, parameter: Tensor) -> None:
        start = time.thread_time()
        arrive(self, number, parameter)
        hooks[0] += time.thread_time() - start

    with mock.patch.object(Backward, "_arrive", clocked_arrive):
        sync = tw.attach(model, method, messages=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(steps + WARM_UP):
        before = time.process_time(), hooks[0], _engine_time(sync), Clock.spent
        optimizer.zero_grad()
        workload.loss(model, step, 0, 1).backward()
        optimizer.step()
        spent = hooks[0] - before[1] + _engine_time(sync) - before[2]
        loops, whole = Clock.spent - before[3], time.process_time() - before[0]
        found.append((spent / whole, loops / whole, (spent - loops) / whole))
    all_of_it, loops, own = (statistics.median(column) for column in zip(*found[WARM_UP:], strict=True))
    return all_of_it, loops, own


def _engine_time(sync: Synchronizer) -> float:
    if sync._engine is None:
        return 0.0
    ident = sync._engine._thread.ident
    assert ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(ident))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="image:blocks=9")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clocked(signs, settling, factors, orthogonal)
    with tempfile.TemporaryDirectory() as folder, mock.patch("thinwire.runtime.binding.Transport", Alone):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for i, method in enumerate(METHODS):
            workload = load(args.workload, None, 0)
            if i == 0:
                print(f"{args.workload}, {len(list(workload.model.parameters()))} tensors, {args.steps} steps\n")
                print("| method | of a step | compiled loops | the engine's own | at most |\n|---|---|---|---|---|")
            cells = " | ".join(f"{part:.1%}" for part in share(workload, method, args.steps))
            print(f"| `{method}` | {cells} | {MOST:.0%} |", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
