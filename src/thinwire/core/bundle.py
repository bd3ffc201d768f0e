"""Small tensors that go uncompressed travel end to end as one: what they cost is that they are many.

Each number's answer depends on that number alone, so it has the same bits in any company. States stay by tensor: they
are laid end to end for a step and copied back. Where a mean is not finite, each tensor takes the step over again by
itself, from the answers that came for all, so that a bad number voids no tensor but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from thinwire.core.exchange import exchange
from thinwire.core.method import Context, Method, State
from thinwire.core.requests import Batched, Exchange
from thinwire.core.value import Value, finite, made

Outcome = tuple[Value, State]


class Given(NamedTuple):
    """A tensor that is to be reduced."""

    x: Tensor
    state: State
    ctx: Context


class Start(NamedTuple):
    """Exchanges, and the numbers of the parts that each is for."""

    exchanges: list[Exchange[Any]]
    members: list[list[int]]

    def outcomes(self, results: Sequence[Any]) -> list[Outcome]:
        """Of each part, from what the exchanges returned."""
        found: dict[int, Outcome] = {}
        for members, result in zip(self.members, results, strict=True):
            found |= zip(members, result if len(members) > 1 else [result], strict=True)
        return [found[i] for i in range(len(found))]


def start(method: Method, parts: Sequence[Given]) -> Start:
    """One exchange for each part, and one for all that join and stand alike."""
    alike: dict[Any, list[int]] = {}
    for i, (x, _, ctx) in enumerate(parts):
        key = (x.dtype, x.device, ctx.lr, ctx.last_lr) if method.joins(x, ctx) else i
        alike.setdefault(key, []).append(i)
    members = list(alike.values())
    chosen = [[parts[i] for i in some] for some in members]
    return Start([_together(method, p) if len(p) > 1 else exchange(method, *p[0]) for p in chosen], members)


def _together(method: Method, parts: Sequence[Given]) -> Exchange[list[Outcome]]:
    joined, ctx = method.joined(), parts[0].ctx
    layout = Layout([part.x for part in parts], joined.pieces(ctx))
    x, states = layout.end_to_end(layout.xs), [part.state for part in parts]
    before = layout.join(states)
    whole, replies = exchange(joined, x, before, ctx), []
    reply = None
    while True:
        try:
            request = whole.send(reply)
        except StopIteration as stop:
            mean, after = stop.value
            break
        reply = yield request
        if not isinstance(request, Batched):
            replies.append(reply)
    if not finite(mean):
        return [_again(exchange(method, *part), layout, i, replies) for i, part in enumerate(parts)]
    layout.copy(made(mean, x), layout.xs)
    if after is not before:
        layout.part(after, states)
        states = [type(state)(*state) for state in states]
    return list(zip(layout.xs, states, strict=True))


def _again(alone: Exchange[Outcome], layout: Layout, i: int, replies: Sequence[Any]) -> Outcome:
    """A step of part ``i`` by itself, from its share of the replies."""
    waiting, reply = iter(replies), None
    while True:
        try:
            request = alone.send(reply)
        except StopIteration as stop:
            outcome: Outcome = stop.value
            return outcome
        reply = request.function([request.args])[0] if isinstance(request, Batched) else layout.own(i, next(waiting))


class Layout:
    """Tensors cut into ``pieces``, the last of which may be short: the first piece of each, the second of each ..."""

    def __init__(self, xs: Sequence[Tensor], pieces: int) -> None:
        self.xs = xs
        self._pieces = pieces
        self._columns = tuple(-(-x.numel() // pieces) for x in xs)
        self._starts = [0, *accumulate(self._columns)]

    def end_to_end(self, tensors: Sequence[Tensor], pieces: int | None = None) -> Tensor:
        """As one vector, with zeros where a piece is short."""
        flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        size = (self._pieces if pieces is None else pieces) * self._starts[-1]
        if self._in_order(flat, size):
            return flat
        places = _places(tuple([t.numel() for t in tensors]), self._columns, flat.device)
        return flat.new_zeros(size).index_copy_(0, places, flat)

    def copy(self, vector: Tensor, outs: Sequence[Tensor]) -> None:
        """Back to where they came from."""
        sizes = tuple([out.numel() for out in outs])
        if not self._in_order(vector, sum(sizes)):
            vector = vector[_places(sizes, self._columns, vector.device)]
        parts = torch.split_with_sizes(vector, sizes)
        torch._foreach_copy_([out if out.dim() == 1 else out.view(-1) for out in outs], parts)

    def join(self, states: Sequence[Any]) -> Any:
        """The state of all: its tensors are like the x's, or like one piece of each."""
        if isinstance(states[0], tuple):
            joined = [self.join(fields) for fields in zip(*states, strict=True)]
            return type(states[0])(*joined) if joined else states[0]
        return self.end_to_end(states, None if states[0].shape == self.xs[0].shape else 1)

    def part(self, joined: Any, states: Sequence[Any]) -> None:
        """Copy it back."""
        if isinstance(joined, tuple):
            for field, fields in zip(joined, zip(*states, strict=True), strict=True):
                self.part(field, fields)
        else:
            self.copy(joined, states)

    def own(self, i: int, reply: Any) -> Any:
        """The share of part ``i``."""
        start, end, x = self._starts[i], self._starts[i + 1], self.xs[i]
        if isinstance(reply, Tensor):
            return reply.view(self._pieces, -1)[:, start:end].reshape(-1)[: x.numel()].view(x.shape)
        return type(reply)(*(t[:, start:end] for t in reply))

    def _in_order(self, vector: Tensor, size: int) -> bool:
        """Whether it is one piece of each, none of them short."""
        return vector.numel() == size == self._starts[-1]


@lru_cache(maxsize=256)
def _places(sizes: Sequence[int], columns: Sequence[int], device: torch.device) -> Tensor:
    """Where the numbers of tensors that lie end to end stand in the vector of all. One index in place of many views."""
    starts, whole = accumulate(columns, initial=0), sum(columns)
    places = []
    for size, own, start in zip(sizes, columns, starts, strict=False):
        numbers = torch.arange(size)
        places.append(numbers // own * whole + start + numbers % own)
    return torch.cat(places).to(device)
