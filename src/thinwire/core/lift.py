"""Lifts turn a compressor, which only encodes and decodes, into a method, which communicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.core.method import Compressor, Context, Method, Reduced, State
from thinwire.core.requests import AllGather, AllReduce, AllToAll, Exchange


class Raw(NamedTuple):
    """A payload that is the tensor itself."""

    values: Tensor


@dataclass(frozen=True, slots=True)
class Identity:
    """The compressor that loses nothing."""

    def encode(self, x: Tensor, sizes: Tensor) -> Raw:
        return Raw(x)

    def decode(self, payload: Raw, n: int) -> Tensor:
        return payload.values


@dataclass(frozen=True, slots=True)
class Cast(Method):
    """All-reduce in a narrower type: half the bytes, and the rounding is lost."""

    dtype: torch.dtype

    def reduce(self, x: Tensor, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        narrow = x.to(self.dtype)
        mean = yield AllReduce(narrow)
        return Reduced(mean.to(x.dtype), sent=narrow.to(x.dtype)), state


class TwoWayState(NamedTuple):
    server_error: Tensor  # (size of my chunk,)


@dataclass(frozen=True, slots=True)
class TwoWay(Method):
    """A parameter server shared out: rank j serves chunk j of every tensor, and compresses its answer too.

    push    all-to-all of C(x) by chunks
    server  a = mean_i C(x_i) + ratio * e~;   D~ = C(a);   e~ = a - D~
    pull    all-gather of D~
    """

    compressor: Compressor
    max_ratio: float | None = None
    """Bound on eta_{t-1}/eta_t for the server's error; None keeps the error as it is."""

    def init(self, x: Tensor, ctx: Context) -> TwoWayState:
        return TwoWayState(x.new_zeros(_chunk_sizes(x.numel(), ctx.world)[ctx.rank]))

    def reduce(self, x: Tensor, state: TwoWayState, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        d, sizes = x.numel(), _chunk_sizes(x.numel(), ctx.world)
        columns, mine = sizes[0], sizes[ctx.rank]
        real = torch.tensor(sizes, dtype=x.dtype, device=x.device).unsqueeze(1)
        rows = _padded(x.flatten(), ctx.world * columns).view(ctx.world, columns)

        pushed = self.compressor.encode(rows, real)
        received = yield AllToAll(pushed)
        error = state.server_error * bounded_ratio(ctx, self.max_ratio)
        a = self.compressor.decode(received, columns)[:, :mine].mean(0) + error
        answer = self.compressor.encode(_padded(a, columns), real[ctx.rank])
        pulled = yield AllGather(answer)

        mean = self.compressor.decode(pulled, columns).flatten()[:d].view_as(x)
        sent = self.compressor.decode(pushed, columns).flatten()[:d].view_as(x)
        if ctx.lr == 0:
            return Reduced(mean, sent), state
        return Reduced(mean, sent), TwoWayState(a - self.compressor.decode(answer, columns)[:mine])

    def withheld(self, x: Tensor, state: TwoWayState, ctx: Context) -> Tensor:
        sizes = _chunk_sizes(x.numel(), ctx.world)
        out, start = torch.zeros_like(x).flatten(), sum(sizes[: ctx.rank])
        out[start : start + sizes[ctx.rank]] = state.server_error * ctx.world
        return out.view_as(x)

    def resize(self, x: Tensor, states: Sequence[Any], ctx: Context) -> TwoWayState:
        return self.init(x, ctx)  # the server's error moves into the workers', through withheld()

    def dense(self) -> Method:
        return TwoWay(Identity())


def two_way(compressor: Compressor, max_ratio: float | None = None) -> Method:
    """Compressed all-to-all, mean with the server's error, compressed all-gather."""
    return TwoWay(compressor, max_ratio)


def bounded_ratio(ctx: Context, most: float | None) -> float:
    """eta_{t-1}/eta_t for an error that follows the learning rate, at most ``most``; else 1."""
    return 1.0 if most is None else min(ctx.lr_ratio, most)


def _chunk_sizes(numel: int, world: int) -> list[int]:
    columns = max(1, -(-numel // world))
    return [min(columns, max(0, numel - i * columns)) for i in range(world)]


def _padded(vector: Tensor, n: int) -> Tensor:
    return pad(vector, (0, n - len(vector))) if len(vector) < n else vector  # pad copies even where it adds nothing
