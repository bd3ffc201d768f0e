"""Lifts turn a compressor, which only encodes and decodes, into a method, which communicates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from thinwire.core.identity import Identity, few
from thinwire.core.method import Compressor, Context, Fused, Method, Reduced, State, Task
from thinwire.core.requests import AllGather, AllReduce, AllToAll, Batched, Exchange, Payload
from thinwire.core.value import Sum, settled


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a payload stands for, in the shape of the memory that it is written to."""

    compressor: Compressor
    payload: Payload
    columns: int
    known: bool | None = None
    """Whether it is finite, where that has been found out."""

    def write(self, out: Tensor) -> None:
        self.write_each([(self, out)])

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        self.subtract_each([(self, p, out)])

    def finite(self) -> bool:
        return self.compressor.finite([self.payload])[0] if self.known is None else self.known

    @staticmethod
    def write_each(batch: Sequence[tuple[Decoded, Tensor]]) -> None:
        for C, members in _by_compressor(batch):
            C.decode([(value.payload, value.columns, out.view(-1)) for value, out in members])

    @staticmethod
    def subtract_each(batch: Sequence[tuple[Decoded, Tensor | Sum, Tensor]]) -> None:
        for C, members in _by_compressor(batch):
            bases = [(p if _left(C, p, out) else settled(p)).flatten() for _, p, out in members]
            parts = zip(members, bases, strict=True)
            C.add([(value.payload, value.columns, base, -1.0, out.view(-1), False) for (value, _, out), base in parts])

    @staticmethod
    def settle_each(batch: Sequence[tuple[Decoded, Decoded, Sum]]) -> None:
        for C, members in _by_compressor(batch):
            if C.fused:
                cast(Fused, C).settle([(sent.payload, mean.payload, mean.columns, p) for sent, mean, p in members])
                continue
            given = [(sent.payload, mean.payload, mean.columns, p.flatten()) for sent, mean, p in members]
            C.add([(sent, columns, p, -1.0, p.error, False) for sent, _, columns, p in given])
            C.decode([(mean, columns, p.x) for _, mean, columns, p in given])


def _left(C: Compressor, p: Tensor | Sum, out: Tensor) -> bool:
    """Whether a sum need not be made."""
    return C.unmade and isinstance(p, Sum) and p.pending and p.error is out


def _by_compressor(batch: Sequence[Any]) -> Iterable[tuple[Compressor, list[Any]]]:
    together: dict[int, tuple[Compressor, list[Any]]] = {}  # by identity: looking at options takes longer
    for member in batch:
        C = member[0].compressor
        together.setdefault(id(C), (C, []))[1].append(member)
    return together.values()


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
        return self.compressor.finite([self.payload])[0]

    def _add(self, out: Tensor, alpha: float) -> None:
        flat, share = out.view(-1), alpha / self.payload[0].shape[0]
        self.compressor.add([(self.payload, self.columns, flat, share, flat, True)])


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
        pushed = yield Batched(C.encode, (x, 1, d))
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

    def pieces(self, ctx: Context) -> int:
        return ctx.world if isinstance(self.compressor, Identity) else 0

    def init(self, x: Tensor, ctx: Context) -> TwoWayState:
        return TwoWayState(x.new_zeros(_chunk_sizes(x.numel(), ctx.world)[ctx.rank]))

    def reduce(self, x: Tensor | Sum, state: TwoWayState, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        C, columns = self.compressor, _columns(x.numel(), ctx.world)
        pushed = yield Batched(C.encode, (x, ctx.world, columns))
        received = yield AllToAll(pushed)

        task = Task(received, columns, state.server_error, bounded_ratio(ctx, self.max_ratio))
        answer = yield Batched(self._answer, task)
        pulled = yield AllGather(answer)

        good = yield Batched(self._settle, (task, answer, pulled, ctx.lr != 0))
        out = Reduced(Decoded(C, pulled, columns, good), sent=Decoded(C, pushed, columns))
        return out, TwoWayState(task.error) if good and ctx.lr != 0 else state

    def _answer(self, tasks: Sequence[Task]) -> list[Payload]:
        """C(a), as the one row that it is"""
        if self.compressor.fused:
            return list(cast(Fused, self.compressor).serve(tasks))
        answers: list[Payload] = []
        for some in few(tasks, lambda task: task.error.numel()):
            sums = [torch.empty_like(task.error) for task in some]
            self._sum(some, sums)
            encoded = self.compressor.encode([(a, 1, task.columns) for task, a in zip(some, sums, strict=True)])
            answers += [type(payload)(*(t[0] for t in payload)) for payload in encoded]
        return answers

    def _settle(self, batch: Sequence[tuple[Task, Payload, Payload, bool]]) -> Sequence[bool]:
        """e~ = a - C(a), if the step is applied and what all have pulled is finite; whether that is.

        a is made twice, since the error must outlive a step that goes wrong, and what is kept until then is 1/W of all.
        """
        good = self.compressor.finite([pulled for _, _, pulled, _ in batch])
        served = [
            (task, answer) for (task, answer, _, applied), one in zip(batch, good, strict=True) if applied and one
        ]
        if self.compressor.fused:
            cast(Fused, self.compressor).settle_served(served)
        elif served:
            self._sum([task for task, _ in served], [task.error for task, _ in served])
            rows = [(task, type(answer)(*(t[None] for t in answer))) for task, answer in served]
            self.compressor.add([(answer, task.columns, task.error, -1.0, task.error, False) for task, answer in rows])
        return good

    def _sum(self, tasks: Sequence[Task], outs: Sequence[Tensor]) -> None:
        """a"""
        parts = []
        for task, out in zip(tasks, outs, strict=True):
            scaled = task.error if task.ratio == 1 else torch.mul(task.error, task.ratio, out=out)
            parts.append((task.received, task.columns, scaled, 1 / task.received[0].shape[0], out, True))
        self.compressor.add(parts)

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


def _columns(numel: int, world: int) -> int:
    return max(1, -(-numel // world))


def _chunk_sizes(numel: int, world: int) -> list[int]:
    columns = _columns(numel, world)
    return [min(columns, max(0, numel - i * columns)) for i in range(world)]
