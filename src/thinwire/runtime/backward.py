"""The adapter to a module that nobody wraps: its gradients are averaged where backward leaves them."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain, repeat
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future

from thinwire.runtime.buckets import Bucket, Part, grouped
from thinwire.runtime.synchronizer import Synchronizer, wait_for

SIZES = (4 << 20, 8 << 20)
"""Bytes of the gradients that are handed over last and last but one: nothing hides what these wait for."""
SIZE = 16 << 20
"""Of all before them: each group costs calls, whatever its size."""
EARLY = (1 << 20, 4 << 20)
"""Of the first two where a step waits for the wire: until the first has come, that has nothing to do."""


class Backward:
    """Hands gradients over in the reverse order of the parameters, whatever the order in which they come."""

    def __init__(self, module: nn.Module, sync: Synchronizer) -> None:
        sync.silent = False
        self._sync = sync
        self._trained = [p for p in module.parameters() if p in sync.ledger.names][::-1]
        self._names = [sync.ledger.names[p] for p in self._trained]
        self._futures: list[Future[Any]] = []
        self._due: list[int] = []
        """Of each group, how many have not come yet; nothing between two backwards."""
        self._come = bytearray(len(self._trained))
        self._cut()
        # by number: to look a tensor up takes as long as all else that is done when it comes
        for number, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(partial(self._arrive, number))  # type: ignore[no-untyped-call]

    def _cut(self) -> None:
        """A group for each message, where it is known how long these had best be."""
        self._cuts = self._sync.cuts
        if not self._cuts.guide:
            sizes, self._closing = _by_size(self._trained, EARLY if self._cuts.thin else ()), None
        else:
            sizes, self._closing = _by_cuts(self._trained, self._cuts.parts)
        self._groups = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        self._group_of = [group for group, size in enumerate(sizes) for _ in range(size)]

    def _arrive(self, number: int, parameter: Tensor) -> None:
        if self._sync.silent:
            return
        if not self._due:
            self._begin()
        if parameter.grad is None:
            lost = "has lost its gradient to another hook: nothing is left to average"
            self._sync.fail(f"parameter {self._names[number]!r} {lost}")
        if self._come[number]:
            twice = "has two gradients in one backward: was part of it run again?"
            self._sync.fail(f"parameter {self._names[number]!r} {twice}")
        self._come[number] = True
        group = self._group_of[number]
        self._due[group] -= 1
        if not self._due[group]:
            while len(self._futures) < len(self._due) and not self._due[len(self._futures)]:
                self._futures.append(self._sync.submit(self._bucket(len(self._futures))))

    def _begin(self) -> None:
        if self._cuts is not self._sync.cuts:  # they are known better now, on all ranks alike
            self._cut()
        self._due = [len(group) for group in self._groups]
        self._sync.begin()
        # to be called when this backward is over, on the thread that began it, as DDP does
        Variable._execution_engine.queue_callback(self._finish)

    def _bucket(self, number: int) -> Bucket:
        given = ((self._names[i], self._trained[i], self._trained[i].grad) for i in self._groups[number])
        parts = [Part(name, parameter, grad) for name, parameter, grad in given if grad is not None]
        closes = None if self._closing is None else number in self._closing
        return Bucket(number, parts, [part.grad for part in parts], number == len(self._groups) - 1, closes)

    def _finish(self) -> None:
        missing = [name for name, come in zip(self._names, self._come, strict=True) if not come]
        futures, self._futures, self._due = self._futures, [], []
        self._come = bytearray(len(self._trained))
        if missing:
            self._sync.fail(
                f"{len(missing)} parameters have no gradient, {missing[0]!r} is one: where a step may leave some"
                " unused, attach DistributedDataParallel(model, find_unused_parameters=True)"
            )
        wait_for(futures)


def _by_size(reverse: Sequence[Tensor], early: Sequence[int]) -> list[int]:
    """How many parameters are in each group."""
    forward = grouped(reversed(reverse), lambda p: p, chain(SIZES, repeat(SIZE)))
    if len(forward) > 2 and forward[-1][0].dtype == forward[-2][0].dtype and _bytes(forward[-1]) < SIZES[0]:
        forward[-2:] = [forward[-2] + forward[-1]]  # a small one that comes first would hide nothing
    first = grouped(reversed(forward.pop()), lambda p: p, chain(early, repeat(sys.maxsize))) if forward else []
    return [len(group) for group in (*first, *reversed(forward))]


def _by_cuts(reverse: Sequence[Tensor], cuts: Sequence[float]) -> tuple[list[int], set[int]]:
    """Each parameter goes into the message that its middle falls into; and the numbers of the groups that end one.

    Such a group is divided where it is large, since a dense warm-up has a message for each.
    """
    ends = list(accumulate(p.nbytes for p in reverse))
    messages: dict[int, list[Tensor]] = {}
    for p, end in zip(reverse, ends, strict=True):
        messages.setdefault(bisect_right(cuts, (end - p.nbytes / 2) / max(1, ends[-1])), []).append(p)
    sizes: list[int] = []
    closing = set()
    for message in messages.values():
        sizes += [len(group) for group in grouped(message, lambda p: p, repeat(SIZE))]
        closing.add(len(sizes) - 1)
    return sizes, closing


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
