"""Combinators: methods made of methods. They separate when, and which tensor, from how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.core.lift import bounded_ratio
from thinwire.core.method import Context, Dense, Method, Reduced, State
from thinwire.core.price import bytes_per_step
from thinwire.core.requests import Batched, Exchange
from thinwire.core.value import WIDE, Sum, finite, settle_each

SMALL = 1 << 14
"""Numbers of a tensor that joins others; laying end to end what is larger would cost more than it spares."""


class Wrapper(Method):
    """A method around another one; transparent where a subclass does not say otherwise."""

    __slots__ = ()
    inner: Method

    @property
    def widens(self) -> bool:  # type: ignore[override]
        return self.inner.widens

    @property
    def whole(self) -> bool:
        return self.inner.whole

    def joined(self) -> Method:
        return replace(self, inner=self.inner.joined())  # type: ignore[type-var]

    def pieces(self, ctx: Context) -> int:
        return self.inner.pieces(ctx)

    def keeps(self, x: Tensor, ctx: Context) -> bool:
        return self.inner.keeps(x, ctx)

    def init(self, x: Tensor, ctx: Context) -> State:
        return self.inner.init(x, ctx)

    def reduce(self, x: Tensor, state: Any, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        return self.inner.reduce(x, state, ctx)

    def withheld(self, x: Tensor, state: Any, ctx: Context) -> Tensor:
        return self.inner.withheld(x, state, ctx)

    def refund(self, state: Any, amount: Tensor) -> State:
        return self.inner.refund(state, amount)

    def resize(self, x: Tensor, states: Sequence[Any], ctx: Context) -> State:
        return self.inner.resize(x, states, ctx)

    def bare(self) -> Method:
        return replace(self, inner=self.inner.bare())  # type: ignore[type-var]

    def dense(self) -> Method:
        return self.inner.dense()


class ErrorFeedbackState(NamedTuple):
    error: Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Wrapper):
    """p = x + ratio * e;   send C(p);   e = p - C(p)"""

    widens: ClassVar[bool] = True
    inner: Method
    max_ratio: float | None = None
    """Bound on eta_{t-1}/eta_t for the error; None keeps the error as it is."""

    def keeps(self, x: Tensor, ctx: Context) -> bool:
        return self.inner.unmade and x.is_contiguous()

    def init(self, x: Tensor, ctx: Context) -> ErrorFeedbackState:
        error = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return ErrorFeedbackState(error, self.inner.init(x, ctx))

    def reduce(self, x: Tensor, state: ErrorFeedbackState, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        p = Sum(x, state.error, bounded_ratio(ctx, self.max_ratio))
        if not self.inner.adds and not finite(p.made()):
            p.out.fill_(float("nan"))  # a method that sends a part of p could leave the bad number in the error, unseen
        out, inner = yield from self.inner.reduce(p if self.inner.adds else p.out, state.inner, ctx)  # type: ignore[arg-type]
        if ctx.lr != 0:  # at a rate of 0 nothing is applied, so nothing is withheld
            mean = yield Batched(settle_each, (p, out.sent, out.mean, state.error, ctx.keep))
            out = Reduced(mean, out.sent)
        return out, ErrorFeedbackState(state.error, inner)

    def withheld(self, x: Tensor, state: ErrorFeedbackState, ctx: Context) -> Tensor:
        return state.error + self.inner.withheld(x, state.inner, ctx)

    def refund(self, state: ErrorFeedbackState, amount: Tensor) -> ErrorFeedbackState:
        return state._replace(error=state.error + amount)

    def resize(self, x: Tensor, states: Sequence[Any], ctx: Context) -> ErrorFeedbackState:
        world, owed = len(states), torch.zeros_like(x)
        for rank, state in enumerate(states):
            owed += self.withheld(x, state, ctx._replace(rank=rank, world=world))
        return ErrorFeedbackState(owed / world, self.inner.resize(x, [s.inner for s in states], ctx))

    def dense(self) -> Method:
        # keeps the error: a tensor that the method takes at one number of workers and not at another still owes it
        return replace(self, inner=self.inner.dense())


class Local(Wrapper):
    """What a worker does to every gradient before it is exchanged, whichever tensors the method takes and from when."""

    __slots__ = ()
    widens: ClassVar[bool] = False

    def around(self, inner: Method) -> Method:
        """The same before another method."""
        return replace(self, inner=inner)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Clip(Local):
    """The worker's gradient, scaled down to a norm of ``limit`` if it is longer."""

    limit: float
    inner: Method

    def reduce(self, x: Tensor, state: Any, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        # a zero gradient has an infinite limit / norm, which is no limit
        return self.inner.reduce(x.mul_((self.limit / x.norm()).clamp(max=1)), state, ctx)


@dataclass(frozen=True, slots=True)
class Whole(Wrapper):
    """Takes the whole gradient as one vector, when the last of it has arrived."""

    inner: Method

    @property
    def whole(self) -> bool:
        return True

    def reduce(self, x: Tensor, state: Any, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        out, state = yield from self.inner.reduce(x, state, ctx)
        if not finite(out.mean):
            out = out._replace(mean=torch.full_like(x, float("nan")))  # seen in every tensor, wherever it stood
        return out, state


@dataclass(frozen=True, slots=True)
class After(Wrapper):
    """Dense at first; the method from step ``start`` on, or from when ``start()`` is true on every worker."""

    start: int | Callable[[], bool]
    inner: Method

    def reduce(self, x: Tensor, state: Any, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        if self._begun(ctx):
            return (yield from self.inner.reduce(x, state, ctx))
        out, _ = yield from Dense(own=True).reduce(x, (), ctx)
        return out, state

    def keeps(self, x: Tensor, ctx: Context) -> bool:
        return self._begun(ctx) and self.inner.keeps(x, ctx)

    def joins(self, x: Tensor, ctx: Context) -> bool:
        return self.inner.joins(x, ctx)

    def pieces(self, ctx: Context) -> int:
        return self.inner.pieces(ctx) if self._begun(ctx) else 1

    def _begun(self, ctx: Context) -> bool:
        return self.start() if callable(self.start) else ctx.step >= self.start

    def bare(self) -> Method:
        return self.inner.bare()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which tensors a method takes."""

    min_dims: int = 0
    """Fewest dimensions: 2 leaves out biases and norms."""
    min_size: int = 0
    """Fewest elements."""
    min_saving: float = 2.0
    """Least ratio of dense bytes to the method's."""

    def __post_init__(self) -> None:
        for key in ("min_dims", "min_size", "min_saving"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must be at least 0, not {getattr(self, key)}")

    def __call__(self, method: Method, shape: Sequence[int], world: int) -> bool:
        if len(shape) < self.min_dims or prod(shape) < self.min_size:
            return False
        return self.min_saving == 0 or _saving(method, shape, max(2, world)) >= self.min_saving


def _saving(method: Method, shape: Sequence[int], world: int) -> float:
    return bytes_per_step(Dense(), shape, world) / bytes_per_step(method, shape, world)


@dataclass(frozen=True, slots=True)
class Where(Wrapper):
    """The method for the tensors that the rule gives it; the others go dense, in the same collectives."""

    rule: Rule
    inner: Method
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def _chosen(self, x: Tensor, ctx: Context) -> Method:
        key = x.shape, ctx.world
        if key not in self._known:
            # one for all that go dense, so that what it computes for them is computed together
            other = self._known.setdefault("dense", self.inner.dense())
            self._known[key] = self.inner if self.rule(self.inner, *key) else other
        chosen: Method = self._known[key]
        return chosen

    def joins(self, x: Tensor, ctx: Context) -> bool:
        key = "joins", x.shape, ctx.world
        if key not in self._known:
            # of a single number nobody could tell a state like it from one like a piece of it
            small = 1 < x.numel() <= SMALL and self._chosen(x, ctx) is not self.inner
            self._known[key] = small and self.joined().pieces(ctx) > 0
        return self._known[key] and x.is_contiguous()

    def joined(self) -> Method:
        dense: Method = self._known["dense"]
        return dense

    def keeps(self, x: Tensor, ctx: Context) -> bool:
        return self._chosen(x, ctx).keeps(x, ctx)

    def init(self, x: Tensor, ctx: Context) -> State:
        return self._chosen(x, ctx).init(x, ctx)

    def reduce(self, x: Tensor, state: Any, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        chosen = self._chosen(x, ctx)
        return chosen.reduce(x if x.dtype in WIDE or chosen.widens else x.float(), state, ctx)

    def withheld(self, x: Tensor, state: Any, ctx: Context) -> Tensor:
        return self._chosen(x, ctx).withheld(x, state, ctx)

    def resize(self, x: Tensor, states: Sequence[Any], ctx: Context) -> State:
        return self._chosen(x, ctx).resize(x, states, ctx)

    def bare(self) -> Method:
        return self.inner.bare()


def error_feedback(method: Method, max_ratio: float | None = None) -> Method:
    """What a worker could not send is added to its next input."""
    return ErrorFeedback(method, max_ratio)


def clipped(limit: float, method: Method) -> Method:
    """Each worker's gradient clipped to a norm of ``limit``, before all else that ``method`` does; 0 for no limit."""
    return Clip(limit, method) if limit else method


def whole(method: Method) -> Method:
    """``method`` over the whole gradient as one vector."""
    return Whole(method)


def after(start: int | Callable[[], bool], method: Method) -> Method:
    """A dense warm-up of ``start`` steps, with the method's momentum if it has one."""
    if isinstance(method, Local):
        return method.around(after(start, method.inner))
    if isinstance(start, int) and start < 0:
        raise ValueError(f"after must be at least 0, not {start}")
    return After(start, method)


def where(rule: Rule, method: Method) -> Method:
    """``method`` for the tensors of ``rule`` only; the others keep the method's momentum if it has one."""
    if isinstance(method, Local):
        return method.around(where(rule, method.inner))
    return Where(rule, method)
