"""All tensors of a message advance together; same-round requests become one collective.

This is the only place that knows how requests are laid out in buffers. It does not communicate: the engine,
the simulation and the price list each answer the collectives in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.core.requests import AllGather, AllReduce, AllToAll, Batched, Exchange, Request, Swap

R = TypeVar("R")

LARGE = 1 << 13
"""Numbers of a tensor above which a pass over them costs more than a call."""
OPS: dict[type, str] = {AllReduce: "all_reduce", AllGather: "all_gather", AllToAll: "all_to_all", Swap: "swap"}


def bytes_sent(op: str, size: int, world: int) -> int:
    """What ``size`` bytes make it send: a ring's 2(W-1)/W, a gather's W-1, an exchange's (W-1)/W, a swap's all."""
    if op == "swap":
        return size
    factor = {"all_reduce": 2 / world, "all_gather": 1.0, "all_to_all": 1 / world}[op]
    return int(size * (world - 1) * factor)


@dataclass(frozen=True, slots=True)
class Collective:
    """One fused message: ``all_reduce (n,)``, ``all_gather (n,)`` of bytes, ``all_to_all (W, n)`` of bytes.

    A ``swap (n,)`` of bytes is one message to each worker in ``sends``, end to end, and its answer one from each
    worker in ``receives``. What two workers swap in a round is one message each way, whatever else they do in it, so
    both ends know its length.
    """

    op: str
    buffer: Tensor
    sends: Mapping[int, int] = field(default_factory=dict)
    """Bytes for each worker."""
    receives: Mapping[int, int] = field(default_factory=dict)
    """Bytes from each worker."""

    def bytes_sent(self, world: int) -> int:
        """What this worker puts on the wire."""
        return bytes_sent(self.op, self.buffer.numel() * self.buffer.element_size(), world)


class Lockstep(Generic[R]):
    """Advances generators together, a round at a time, until each has returned."""

    def __init__(self, exchanges: Iterable[Exchange[R]] = (), share: float = 1.0) -> None:
        """``share``: what all-reduces are multiplied by as they are packed, for a network that only adds up."""
        self._share = share
        self.scratch: Tensor | None = None
        """Memory that an all-reduce may overwrite: what holds the gradients."""
        self._exchanges: list[Exchange[R]] = []
        self._results: list[R | None] = []
        self._waiting: list[tuple[int, list[Request]]] = []
        self._fused: list[Fused] | None = None
        self.add(exchanges)

    def add(self, exchanges: Iterable[Exchange[R]]) -> list[Request]:
        """Start some more, before the first round; what they ask for in it."""
        assert self._fused is None
        known, first = len(self._waiting), len(self._exchanges)
        self._exchanges += exchanges
        self._results += [None] * (len(self._exchanges) - first)
        self._run([(i, None) for i in range(first, len(self._exchanges))])
        return [request for _, requests in self._waiting[known:] for request in requests]

    @property
    def results(self) -> list[R]:
        """What the generators returned, once ``advance`` has given an empty round."""
        assert self._fused is not None
        assert not self._waiting
        return self._results  # type: ignore[return-value]

    def advance(self, answers: Sequence[Tensor] = ()) -> list[Collective]:
        """Send back the answers to the last round's collectives; return the next round's, empty at the end."""
        if self._fused is not None:
            replies = self._scatter(answers)
            turns = [(i, replies[i]) for i, _ in self._waiting]
            self._waiting = []
            self._run(turns)
        return self._fuse()

    def _run(self, turns: Sequence[tuple[int, Any]]) -> None:
        """Send each generator its reply, and go on until each waits for the others or has returned."""
        while turns:
            turns = self._turn(turns)
        self._waiting.sort(key=itemgetter(0))

    def _turn(self, turns: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Send each generator its reply; those that only want something computed, with what they are to be sent."""
        batched: list[tuple[int, Batched]] = []
        for i, reply in turns:
            try:
                yielded = self._exchanges[i].send(reply)
            except StopIteration as stop:
                self._results[i] = stop.value
            else:
                if isinstance(yielded, Batched):
                    batched.append((i, yielded))
                else:
                    self._waiting.append((i, list(yielded) if isinstance(yielded, tuple) else [yielded]))
        return _computed(batched)

    def _fuse(self) -> list[Collective]:
        groups: dict[tuple[str, torch.dtype], list[tuple[int, int]]] = {}
        for w, (_, requests) in enumerate(self._waiting):
            for r, request in enumerate(requests):
                dtype = request.tensor.dtype if isinstance(request, AllReduce) else torch.uint8
                groups.setdefault((OPS[type(request)], dtype), []).append((w, r))
        # dtypes and ops in a fixed order: every rank issues a round's collectives alike
        ordered = sorted(groups.items(), key=lambda item: (item[0][0], str(item[0][1])))
        self._fused = [Fused(op, members, [self._waiting[w][1][r] for w, r in members]) for (op, _), members in ordered]
        return [fused.collective(self._share, self.scratch) for fused in self._fused]

    def _scatter(self, answers: Sequence[Tensor]) -> dict[int, Any]:
        replies: dict[int, list[Any]] = {i: [None] * len(requests) for i, requests in self._waiting}
        for fused, answer in zip(self._fused or (), answers, strict=True):
            for (w, r), part in zip(fused.members, fused.split(answer), strict=True):
                replies[self._waiting[w][0]][r] = part
        # a generator that yielded a lone request gets a lone answer
        return {i: tuple(parts) if len(parts) > 1 else parts[0] for i, parts in replies.items()}


def _computed(batched: Sequence[tuple[int, Batched]]) -> list[tuple[int, Any]]:
    together: dict[Any, list[tuple[int, Any]]] = {}
    for i, one in batched:
        together.setdefault(one.function, []).append((i, one.args))
    replies: list[tuple[int, Any]] = []
    for function, members in together.items():
        answers = function([args for _, args in members])
        replies += [(i, answer) for (i, _), answer in zip(members, answers, strict=True)]
    return replies


class Fused:
    """Requests of one operation that travel as one: what lies where in the buffer, and in the answer."""

    def __init__(self, op: str, members: Sequence[tuple[int, int]], requests: Sequence[Any]) -> None:
        """``members``: which generator's each request is, and which of its own."""
        self.members = members
        self._op = op
        self._requests = requests
        self._parts = [] if op in ("all_reduce", "swap") else _by_dtype(requests)

    def collective(self, share: float, scratch: Tensor | None) -> Collective:
        if self._op == "swap":
            return _swap(self._requests)
        if self._op == "all_reduce":
            return Collective(self._op, _flat([r.tensor for r in self._requests], share, scratch))
        rows = [] if self._op == "all_gather" else [len(self._requests[0].payload[0])]
        regions = []
        for parts in self._parts:
            flat = [t if t.dim() == len(rows) + 1 else t.reshape(*rows, -1) for _, _, t in parts]
            regions.append(torch.cat(flat, dim=-1).view(torch.uint8))
        return Collective(self._op, torch.cat(regions, dim=-1) if len(regions) > 1 else regions[0])

    def split(self, answer: Tensor) -> Iterable[Any]:
        """What each of the requests is answered."""
        if self._op == "swap":
            return _delivered(self._requests, answer)
        if self._op == "all_reduce":
            own = torch.split_with_sizes(answer, [r.tensor.numel() for r in self._requests])
            return [part.view(r.tensor.shape) for part, r in zip(own, self._requests, strict=True)]
        gathered, world, start = self._op == "all_gather", len(answer), 0
        replies: list[list[Any]] = [[None] * len(r.payload) for r in self._requests]
        for parts in self._parts:
            sizes = [t.numel() // (1 if gathered else world) for _, _, t in parts]
            first, size = parts[0][2], sum(sizes) * parts[0][2].element_size()
            region = answer[:, start : start + size]
            if first.dtype != torch.uint8:  # a fresh copy is aligned, which reading bytes as wider numbers needs
                region = region.clone(memory_format=torch.contiguous_format).view(first.dtype)
            start += size
            for (i, j, t), part in zip(parts, torch.split_with_sizes(region, sizes, dim=1), strict=True):
                shape = t.shape if gathered else t.shape[1:]
                replies[i][j] = part if len(shape) == 1 else part.reshape(world, *shape)
        return [type(r.payload)(*reply) for r, reply in zip(self._requests, replies, strict=True)]


def _swap(requests: Sequence[Any]) -> Collective:
    parts: dict[int, list[Tensor]] = {to: [] for to in sorted({r.to for r in requests if r.to is not None})}
    for request in requests:
        if request.to is not None:
            parts[request.to] += [_bytes(t.reshape(-1)) for t in request.payload]
    nothing = requests[0].payload[0].new_empty(0, dtype=torch.uint8)
    buffer = torch.cat([nothing, *(t for messages in parts.values() for t in messages)])
    sends = {to: sum(len(t) for t in messages) for to, messages in parts.items()}
    return Collective("swap", buffer, sends, _received(requests))


def _received(requests: Sequence[Swap[Any]]) -> dict[int, int]:
    """Bytes from each worker, in order of rank."""
    sizes = dict.fromkeys(sorted({r.source for r in requests if r.source is not None}), 0)
    for request in requests:
        if request.source is not None:
            sizes[request.source] += sum(t.numel() * t.element_size() for t in request.payload)
    return sizes


def _delivered(requests: Sequence[Any], answer: Tensor) -> Iterator[Any]:
    starts, start = {}, 0
    for source, size in _received(requests).items():
        starts[source], start = start, start + size
    for request in requests:
        if request.source is None:
            yield None
            continue
        parts = []
        for t in request.payload:
            start, size = starts[request.source], t.numel() * t.element_size()
            parts.append(answer[start : start + size].clone().view(t.dtype).view(t.shape))
            starts[request.source] += size
        yield type(request.payload)(*parts)


def cut(buffer: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
    """The messages of a swap, which lie end to end, by the worker at their other end."""
    return dict(zip(sizes, torch.split(buffer, list(sizes.values())), strict=True)) if sizes else {}


def _by_dtype(requests: Sequence[Any]) -> list[list[tuple[int, int, Tensor]]]:
    """The parts of all payloads, by the number of the request and their place in it: those of a type lie together."""
    found: dict[torch.dtype, list[tuple[int, int, Tensor]]] = {}
    for i, request in enumerate(requests):
        for j, t in enumerate(request.payload):
            found.setdefault(t.dtype, []).append((i, j, t))
    return [found[dtype] for dtype in sorted(found, key=str)]


def _flat(tensors: Sequence[Tensor], share: float, scratch: Tensor | None) -> Tensor:
    """The tensors end to end, times ``share``; no copy is made where they are the scratch memory itself."""
    if scratch is not None and scratch.is_contiguous() and sum(t.numel() for t in tensors) == scratch.numel():
        start, size = scratch.data_ptr(), scratch.element_size()
        offsets = accumulate((t.numel() * size for t in tensors), initial=start)
        if all(t.data_ptr() == here and t.is_contiguous() for t, here in zip(tensors, offsets, strict=False)):
            return scratch.view(-1) if share == 1 else scratch.view(-1).mul_(share)
    flat, sizes = [t.reshape(-1) for t in tensors], [t.numel() for t in tensors]
    if share == 1:
        return torch.cat(flat)
    if sum(sizes) < LARGE * len(sizes):
        return torch.cat(flat).mul_(share)
    buffer = flat[0].new_empty(sum(sizes))
    for t, part in zip(flat, torch.split_with_sizes(buffer, sizes), strict=True):
        torch.mul(t, share, out=part)
    return buffer


def requested_bytes(requests: Iterable[Request], world: int) -> int:
    """What requests make a worker send; of a swap its payload, which is alike on all workers, whoever sends it."""
    total = 0
    for request in requests:
        size = request.tensor.nbytes if isinstance(request, AllReduce) else sum([t.nbytes for t in request.payload])
        total += bytes_sent(OPS[type(request)], size, world)
    return total


def _bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def drive(lockstep: Lockstep[Any], answer: Callable[[Collective], Tensor]) -> list[list[Collective]]:
    """Run generators to their end with ``answer`` for a network; return all that was sent, by rounds."""
    rounds: list[list[Collective]] = []
    collectives = lockstep.advance()
    while collectives:
        rounds.append(collectives)
        collectives = lockstep.advance([answer(c) for c in collectives])
    return rounds
