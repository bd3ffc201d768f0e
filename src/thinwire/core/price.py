"""What a step costs on the wire, found by running the method itself on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    tensors = {name: torch.empty(tuple(shape), device="meta") for name, shape in shapes.items()}
    if method.whole:
        tensors = {"": torch.empty(sum(t.numel() for t in tensors.values()), device="meta")}
    tensors = {name: x for name, x in tensors.items() if x.numel()}
    states = [method.init(x, Context(name=name, rank=rank, world=workers)) for name, x in tensors.items()]
    sent: list[Collective] = []
    for now in [PAST_WARM_UP] if step is None else range(step + 1):
        reductions = [
            method.reduce(x, state, Context(step=now, name=name, rank=rank, world=workers))
            for (name, x), state in zip(tensors.items(), states, strict=True)
        ]
        lockstep = Lockstep(reductions)
        sent = drive(lockstep, lambda c: _answer(c, workers))
        states = [state for _, state in lockstep.results]
    return [(c.op, c.bytes_sent(workers)) for c in sent]


def bytes_per_step(method: Method, shape: Sequence[int], workers: int) -> float:
    """Mean over two steps, past every warm-up, for methods whose steps alternate."""
    x = torch.empty(tuple(shape), device="meta")
    state, total = method.init(x, Context(world=workers)), 0
    for turn in range(2):
        lockstep = Lockstep([method.reduce(x, state, Context(step=PAST_WARM_UP + turn, world=workers))])
        total += sum(c.bytes_sent(workers) for c in drive(lockstep, lambda c: _answer(c, workers)))
        _, state = lockstep.results[0]
    return total / 2


def _answer(collective: Collective, workers: int) -> Tensor:
    buffer = collective.buffer
    if collective.op == "swap":
        return buffer.new_empty(sum(collective.receives.values()))
    return buffer.new_empty((workers, *buffer.shape)) if collective.op == "all_gather" else buffer
