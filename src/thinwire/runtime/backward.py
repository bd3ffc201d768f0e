"""The adapter to a module that nobody wraps: its gradients are averaged where backward leaves them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
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
        trained = (p for p in module.parameters() if p in sync.ledger.names)
        self._groups = _groups(trained)
        self._group_of = {p: number for number, group in enumerate(self._groups) for p in group}
        self._futures: list[Future[Any]] = []
        self._due: list[set[Tensor]] = []
        """Of each group, what has not come yet; nothing between two backwards."""
        for parameter in self._group_of:
            parameter.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]

    def _arrive(self, parameter: Tensor) -> None:
        if self._sync.silent:
            return
        if not self._due:
            self._due = [set(group) for group in self._groups]
            # to be called when this backward is over, on the thread that began it, as DDP does
            Variable._execution_engine.queue_callback(self._finish)
        due, name = self._due[self._group_of[parameter]], self._sync.ledger.names[parameter]
        if parameter.grad is None:
            self._sync.fail(f"parameter {name!r} has lost its gradient to another hook: nothing is left to average")
        if parameter not in due:
            self._sync.fail(f"parameter {name!r} has two gradients in one backward: was part of it run again?")
        due.remove(parameter)
        while len(self._futures) < len(self._due) and not self._due[len(self._futures)]:
            self._futures.append(self._sync.submit(self._bucket(len(self._futures))))

    def _bucket(self, number: int) -> Bucket:
        parts = [Part(self._sync.ledger.names[p], p, p.grad) for p in self._groups[number] if p.grad is not None]
        return Bucket(number, parts, [part.grad for part in parts], last=number == len(self._groups) - 1)

    def _finish(self) -> None:
        missing = [self._sync.ledger.names[p] for due in self._due for p in due]
        futures, self._futures, self._due = self._futures, [], []
        if missing:
            self._sync.fail(
                f"{len(missing)} parameters have no gradient, {missing[0]!r} is one: where a step may leave some"
                " unused, attach DistributedDataParallel(model, find_unused_parameters=True)"
            )
        wait_for(futures)


def _groups(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    forward = grouped(parameters, lambda p: p, chain(SIZES, repeat(SIZE)))
    if len(forward) > 2 and forward[-1][0].dtype == forward[-2][0].dtype and _bytes(forward[-1]) < SIZES[0]:
        forward[-2:] = [forward[-2] + forward[-1]]  # a small one that comes first would hide nothing
    return [group[::-1] for group in reversed(forward)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
