"""An all-reduce in two hops, where gloo's ring takes 2 (W-1): on long wires each hop is what a step waits for.

Worker j is sent part j of everybody's numbers, adds them up in the order of ranks, and sends the sum to all: the bytes
of a ring, and the same bits on every worker.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

Item = tuple[dist.Work, Tensor, Tensor, Future[dist.Work]]


class Hops:
    """Second hops go on a group of their own, by one thread, in the order of the first: no race decides on an order."""

    def __init__(self, first: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
        self._group = first
        self._world = dist.get_world_size(first)
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_second_hops, args=(self._items, second), name="thinwire hops", daemon=True
        )
        self._thread.start()

    def all_reduce(self, buffer: Tensor) -> tuple[Sum, Tensor]:
        """The sum, when its work is done."""
        parts = buffer.new_zeros(self._world, -(-buffer.numel() // self._world))
        parts.view(-1)[: buffer.numel()] = buffer
        received = torch.empty_like(parts)
        work = dist.all_to_all_single(received, parts, group=self._group, async_op=True)
        second: Future[dist.Work] = Future()
        self._items.put((work, received, parts, second))
        return Sum(second), parts.view(-1)[: buffer.numel()]

    def close(self) -> None:
        """End the thread. At interpreter exit it must not be caught inside torch's C++ code."""
        self._items.put(None)
        self._thread.join(timeout=5)


class Sum:
    """Stands in for the work of both hops."""

    def __init__(self, second: Future[dist.Work]) -> None:
        self._second = second

    def get_future(self) -> Future[dist.Work]:
        return self._second

    def wait(self) -> None:
        self._second.result().wait()


def _second_hops(items: queue.SimpleQueue[Item | None], group: dist.ProcessGroup) -> None:
    while (item := items.get()) is not None:
        first, received, out, done = item
        try:
            first.wait()
            total = received.sum(0).expand_as(received).contiguous()
            second = dist.all_to_all_single(out, total, group=group, async_op=True)
        except Exception as error:
            done.set_exception(error)
        else:
            second.get_future().add_done_callback(partial(_pass_on, done, second))
        del item, first, received, out, done  # nobody waits with them for the next one


def _pass_on(done: Future[dist.Work], second: dist.Work, _: object) -> None:
    done.set_result(second)
