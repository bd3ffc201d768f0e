"""What a step costs on the wire, found by running the method itself on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.core.lockstep import Collective, Lockstep, drive
from thinwire.core.method import Context, Method

PAST_WARM_UP = 1 << 40


def price(
    method: Method, shapes: Mapping[str, Sequence[int]], workers: int, step: int | None = None, rank: int = 0
) -> list[tuple[str, int]]:
    """The collectives of one step with the bytes that each makes worker ``rank`` send, all tensors in one bucket.

    ``step`` counts from 0, warm-up included; None is a first step past every warm-up. In a tree not all workers send
    alike: rank 0 sends the most.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    if not 0 <= rank < workers:
        raise ValueError(f"rank must be in [0, {workers}), not {rank}")
    steps = [PAST_WARM_UP] if step is None else range(step + 1)
    return [(c.op, c.bytes_sent(workers)) for round_ in _run(method, shapes, workers, steps, rank)[-1] for c in round_]


def rounds(method: Method, shapes: Mapping[str, Sequence[int]], workers: int) -> list[int]:
    """The bytes of each round of a step past every warm-up; of two steps, for methods that alternate, of the longer."""
    turns = [
        [sum(c.bytes_sent(workers) for c in round_) for round_ in step]
        for step in _run(method, shapes, workers, [PAST_WARM_UP, PAST_WARM_UP + 1], rank=0)
    ]
    return max(turns, key=lambda turn: (len(turn), sum(turn)))


def _run(
    method: Method, shapes: Mapping[str, Sequence[int]], workers: int, steps: Iterable[int], rank: int
) -> list[list[list[Collective]]]:
    """What a worker sends, by steps and rounds."""
    tensors = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    if method.whole:
        tensors = {"": torch.empty(sum(t.numel() for t in tensors.values()), device="meta")}
    tensors = {name: x for name, x in tensors.items() if x.numel()}
    states = [method.init(x, Context(name=name, rank=rank, world=workers)) for name, x in tensors.items()]
    sent = []
    for step in steps:
        reductions = [
            method.reduce(x, state, Context(step=step, name=name, rank=rank, world=workers))
            for (name, x), state in zip(tensors.items(), states, strict=True)
        ]
        lockstep = Lockstep(reductions)
        sent.append(drive(lockstep, lambda c: _answer(c, workers)))
        states = [state for _, state in lockstep.results]
    return sent


def bytes_per_step(method: Method, shape: Sequence[int], workers: int) -> float:
    """Mean over two steps, past every warm-up, for methods whose steps alternate."""
    x = torch.empty(tuple(shape), device="meta")
    state, total = method.init(x, Context(world=workers)), 0
    for turn in range(2):
        lockstep = Lockstep([method.reduce(x, state, Context(step=PAST_WARM_UP + turn, world=workers))])
        sent = drive(lockstep, lambda c: _answer(c, workers))
        total += sum(c.bytes_sent(workers) for round_ in sent for c in round_)
        _, state = lockstep.results[0]
    return total / 2


def _answer(collective: Collective, workers: int) -> Tensor:
    buffer = collective.buffer
    if collective.op == "swap":
        return buffer.new_empty(sum(collective.receives.values()))
    return buffer.new_empty((workers, *buffer.shape)) if collective.op == "all_gather" else buffer
