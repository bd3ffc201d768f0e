"""Lifts turn a compressor, which only encodes and decodes, into a method, which communicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.core.method import Compressor, Context, Method, Reduced, State
from thinwire.core.requests import AllGather, AllReduce, AllToAll, Exchange, Payload
from thinwire.core.value import Sum, finite, settled


class Raw(NamedTuple):
    """A payload that is the numbers themselves."""

    values: Tensor  # (rows, columns)


@dataclass(frozen=True, slots=True)
class Identity:
    """The numbers themselves, in ``dtype``."""

    unmade: ClassVar[bool] = False
    dtype: torch.dtype

    def encode(self, x: Tensor | Sum, rows: int, columns: int) -> Raw:
        narrow = settled(x).to(self.dtype)
        return Raw(pad(narrow, (0, rows * columns - len(narrow))).view(rows, columns))

    def decode(self, payload: Raw, columns: int, out: Tensor) -> None:
        out.copy_(payload.values.flatten()[: len(out)])

    def add(self, payload: Raw, columns: int, base: Tensor, alpha: float, out: Tensor, stacked: bool = False) -> None:
        values = payload.values.sum(0, dtype=out.dtype) if stacked else payload.values.view(-1)
        torch.add(base, values[: out.numel()], alpha=alpha, out=out)

    def finite(self, payload: Raw) -> bool:
        return finite(payload.values)


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a payload stands for, in the shape of the memory that it is written to."""

    compressor: Compressor
    payload: Payload
    columns: int

    def write(self, out: Tensor) -> None:
        self.compressor.decode(self.payload, self.columns, out.view(-1))

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        left = self.compressor.unmade and isinstance(p, Sum) and p.pending and p.error is out
        self.compressor.add(self.payload, self.columns, (p if left else settled(p)).flatten(), -1.0, out.view(-1))

    def finite(self) -> bool:
        return self.compressor.finite(self.payload)


@dataclass(frozen=True, slots=True)
class Cast(Method):
    """All-reduce in a narrower type: half the bytes, and the rounding is lost."""

    dtype: torch.dtype

    def reduce(self, x: Tensor, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        narrow = x.to(self.dtype)
        mean = yield AllReduce(narrow)
        return Reduced(mean.to(x.dtype), sent=narrow), state


@dataclass(frozen=True, slots=True)
class MeanDecoded:
    """The mean of what all workers' payloads stand for, summed in the order of their ranks."""

    compressor: Compressor
    payload: Payload  # each tensor (W, ...)
    columns: int

    def write(self, out: Tensor) -> None:
        self._add(out.zero_(), 1.0)

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        self._add(out.copy_(settled(p)), -1.0)

    def finite(self) -> bool:
        return self.compressor.finite(self.payload)

    def _add(self, out: Tensor, alpha: float) -> None:
        flat, share = out.view(-1), alpha / len(self.payload[0])
        self.compressor.add(self.payload, self.columns, flat, share, flat, stacked=True)


@dataclass(frozen=True, slots=True)
class Gathered(Method):
    """One-way: every worker has every payload.   out = mean_i C(x_i)

    The bytes grow with the number of workers, so a tensor that is not taken goes by all-reduce: where the method no
    longer pays, all of them do.
    """

    adds: ClassVar[bool] = True
    compressor: Compressor

    @property
    def unmade(self) -> bool:
        return self.compressor.unmade

    def reduce(self, x: Tensor | Sum, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        C, d = self.compressor, x.numel()
        pushed = C.encode(x.flatten(), 1, d)
        pulled = yield AllGather(type(pushed)(*(t[0] for t in pushed)))
        return Reduced(MeanDecoded(C, pulled, d), sent=Decoded(C, pushed, d)), state


class TwoWayState(NamedTuple):
    server_error: Tensor  # (size of my chunk,)


@dataclass(frozen=True, slots=True)
class TwoWay(Method):
    """A parameter server shared out: rank j serves chunk j of every tensor, and compresses its answer too.

    push    all-to-all of C(x) by chunks
    server  a = mean_i C(x_i) + ratio * e~;   D~ = C(a);   e~ = a - D~
    pull    all-gather of D~
    """

    adds: ClassVar[bool] = True
    compressor: Compressor
    max_ratio: float | None = None
    """Bound on eta_{t-1}/eta_t for the server's error; None keeps the error as it is."""

    @property
    def unmade(self) -> bool:
        return self.compressor.unmade

    def init(self, x: Tensor, ctx: Context) -> TwoWayState:
        return TwoWayState(x.new_zeros(_chunk_sizes(x.numel(), ctx.world)[ctx.rank]))

    def reduce(self, x: Tensor | Sum, state: TwoWayState, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        C, columns = self.compressor, _chunk_sizes(x.numel(), ctx.world)[0]
        pushed = C.encode(x.flatten(), ctx.world, columns)
        received = yield AllToAll(pushed)

        ratio, e = bounded_ratio(ctx, self.max_ratio), state.server_error
        # made twice, since the error must outlive a step that goes wrong, and a copy kept until then is 1/W of a model
        answer = C.encode(self._served(received, columns, e, ratio, torch.empty_like(e)), 1, columns)
        pulled = yield AllGather(type(answer)(*(t[0] for t in answer)))

        out = Reduced(Decoded(C, pulled, columns), sent=Decoded(C, pushed, columns))
        if ctx.lr == 0 or not C.finite(pulled):
            return out, state
        C.add(answer, columns, self._served(received, columns, e, ratio, e), -1.0, out=e)
        return out, TwoWayState(e)

    def _served(self, received: Payload, columns: int, e: Tensor, ratio: float, out: Tensor) -> Tensor:
        scaled = e if ratio == 1 else torch.mul(e, ratio, out=out)
        self.compressor.add(received, columns, scaled, 1 / len(received[0]), out=out, stacked=True)
        return out

    def withheld(self, x: Tensor, state: TwoWayState, ctx: Context) -> Tensor:
        sizes = _chunk_sizes(x.numel(), ctx.world)
        out, start = torch.zeros_like(x).flatten(), sum(sizes[: ctx.rank])
        out[start : start + sizes[ctx.rank]] = state.server_error * ctx.world
        return out.view_as(x)

    def resize(self, x: Tensor, states: Sequence[Any], ctx: Context) -> TwoWayState:
        return self.init(x, ctx)  # the server's error moves into the workers', through withheld()

    def dense(self) -> Method:
        # half the bytes, since what rounding takes away comes back through the errors
        return replace(self, compressor=Identity(torch.bfloat16))


def gathered(compressor: Compressor) -> Method:
    """Compressed all-gather, and the mean of what arrives."""
    return Gathered(compressor)


def two_way(compressor: Compressor, max_ratio: float | None = None) -> Method:
    """Compressed all-to-all, mean with the server's error, compressed all-gather."""
    return TwoWay(compressor, max_ratio)


def bounded_ratio(ctx: Context, most: float | None) -> float:
    """eta_{t-1}/eta_t for an error that follows the learning rate, at most ``most``; else 1."""
    return 1.0 if most is None else min(ctx.lr_ratio, most)


def _chunk_sizes(numel: int, world: int) -> list[int]:
    columns = max(1, -(-numel // world))
    return [min(columns, max(0, numel - i * columns)) for i in range(world)]
