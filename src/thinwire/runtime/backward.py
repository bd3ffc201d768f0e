"""The adapter to a module that nobody wraps: its gradients are averaged where backward leaves them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, groupby, repeat
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


class Backward:
    """Hands gradients over in the reverse order of the parameters, whatever the order in which they come."""

    def __init__(self, module: nn.Module, sync: Synchronizer) -> None:
        sync.silent = False
        self._sync = sync
        self._trained = [p for p in module.parameters() if p in sync.ledger.names][::-1]
        self._futures: list[Future[Any]] = []
        self._due: list[set[Tensor]] = []
        """Of each group, what has not come yet; nothing between two backwards."""
        self._cut()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def _cut(self) -> None:
        """A group for each message, where it is known how long these had best be."""
        self._cuts = self._sync.cuts
        if self._cuts is None:
            self._groups, self._closing = _by_size(self._trained), None
        else:
            self._groups, self._closing = _by_cuts(self._trained, self._cuts)
        self._group_of = {p: number for number, group in enumerate(self._groups) for p in group}

    def _arrive(self, parameter: Tensor) -> None:
        if self._sync.silent:
            return
        if not self._due:
            self._begin()
        due, name = self._due[self._group_of[parameter]], self._sync.ledger.names[parameter]
        if parameter.grad is None:
            self._sync.fail(f"parameter {name!r} has lost its gradient to another hook: nothing is left to average")
        if parameter not in due:
            self._sync.fail(f"parameter {name!r} has two gradients in one backward: was part of it run again?")
        due.remove(parameter)
        while len(self._futures) < len(self._due) and not self._due[len(self._futures)]:
            self._futures.append(self._sync.submit(self._bucket(len(self._futures))))

    def _begin(self) -> None:
        if self._cuts is not self._sync.cuts:  # they are known better now, on all ranks alike
            self._cut()
        self._due = [set(group) for group in self._groups]
        self._sync.begin()
        # to be called when this backward is over, on the thread that began it, as DDP does
        Variable._execution_engine.queue_callback(self._finish)

    def _bucket(self, number: int) -> Bucket:
        parts = [Part(self._sync.ledger.names[p], p, p.grad) for p in self._groups[number] if p.grad is not None]
        closes = None if self._closing is None else number in self._closing
        return Bucket(number, parts, [part.grad for part in parts], number == len(self._groups) - 1, closes)

    def _finish(self) -> None:
        missing = [self._sync.ledger.names[p] for due in self._due for p in due]
        futures, self._futures, self._due = self._futures, [], []
        if missing:
            self._sync.fail(
                f"{len(missing)} parameters have no gradient, {missing[0]!r} is one: where a step may leave some"
                " unused, attach DistributedDataParallel(model, find_unused_parameters=True)"
            )
        wait_for(futures)


def _by_size(reverse: Sequence[Tensor]) -> list[list[Tensor]]:
    forward = grouped(reversed(reverse), lambda p: p, chain(SIZES, repeat(SIZE)))
    if len(forward) > 2 and forward[-1][0].dtype == forward[-2][0].dtype and _bytes(forward[-1]) < SIZES[0]:
        forward[-2:] = [forward[-2] + forward[-1]]  # a small one that comes first would hide nothing
    return [group[::-1] for group in reversed(forward)]


def _by_cuts(reverse: Sequence[Tensor], cuts: Sequence[float]) -> tuple[list[list[Tensor]], set[int]]:
    """Each parameter goes into the message that its middle falls into; and the numbers of the groups that end one.

    Such a group is divided where it is large, since a dense warm-up has a message for each.
    """
    whole, before, message_of = _bytes(reverse), 0, {}
    for p in reverse:
        message_of[p] = bisect_right(cuts, (before + p.nbytes / 2) / max(1, whole))
        before += p.nbytes
    groups: list[list[Tensor]] = []
    closing = set()
    for _, message in groupby(reverse, message_of.__getitem__):
        groups += grouped(message, lambda p: p, repeat(SIZE))
        closing.add(len(groups) - 1)
    return groups, closing


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
