"""Momenta of a worker, before its gradient is compressed.

A step whose mean is not finite leaves no trace, so the old momentum is needed until the mean is known. Where the method
keeps ``x`` as it was given, the new one is made then, in place; else both exist while a tensor is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.core.combine import Local
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import Exchange
from thinwire.core.value import Sparse, finite


class MomentumState(NamedTuple):
    momentum: Tensor
    inner: Any


@dataclass(frozen=True, slots=True)
class Momentum(Local):
    """A worker's momentum, before compression."""

    mu: float
    inner: Method

    def init(self, x: Tensor, ctx: Context) -> MomentumState:
        return MomentumState(torch.zeros_like(x), self.inner.init(x, ctx))

    def withheld(self, x: Tensor, state: MomentumState, ctx: Context) -> Tensor:
        return self.inner.withheld(x, state.inner, ctx)

    def refund(self, state: MomentumState, amount: Tensor) -> MomentumState:
        return state._replace(inner=self.inner.refund(state.inner, amount))

    def resize(self, x: Tensor, states: Sequence[Any], ctx: Context) -> MomentumState:
        momentum = torch.stack([s.momentum for s in states]).mean(0)
        return MomentumState(momentum, self.inner.resize(x, [s.inner for s in states], ctx))


@dataclass(frozen=True, slots=True)
class RunningMean(Momentum):
    """m = mu m + (1 - mu) g;   x = m"""

    def joins(self, x: Tensor, ctx: Context) -> bool:
        return self.inner.joins(x, ctx)

    def reduce(self, x: Tensor, state: MomentumState, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        kept = self.inner.keeps(x, ctx)
        x.lerp_(state.momentum, self.mu)
        m = state.momentum if kept else x.clone()
        out, inner = yield from self.inner.reduce(x, state.inner, ctx._replace(keep=kept))
        if kept and finite(out.mean):
            m.copy_(x)
        return out, MomentumState(m, inner)


@dataclass(frozen=True, slots=True)
class Nesterov(Momentum):
    """m = mu m + g;   x = mu m + g"""

    def joins(self, x: Tensor, ctx: Context) -> bool:
        return self.inner.joins(x, ctx)

    def reduce(self, x: Tensor, state: MomentumState, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        m, mu = state.momentum, self.mu
        kept = self.inner.keeps(x, ctx)
        if kept:
            x.mul_(1 + mu).add_(m, alpha=mu * mu)  # with the new momentum written out
        else:
            m = torch.add(x, m, alpha=mu)
            x.add_(m, alpha=mu)
        out, inner = yield from self.inner.reduce(x, state.inner, ctx._replace(keep=kept))
        if kept and finite(out.mean):
            m.lerp_(x, 1 / (1 + mu))  # (mu m + x) / (1 + mu), which is mu m + g
        return out, MomentumState(m, inner)


@dataclass(frozen=True, slots=True)
class MomentumCorrection(Momentum):
    """u = mu u + g;   x = u;   u = 0 at the coordinates that were sent.

    A dense tensor, or a dense step, is not cut: there it is the momentum that the optimizer has left to the method.
    """

    def reduce(self, x: Tensor, state: MomentumState, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        u = torch.add(x, state.momentum, alpha=self.mu, out=x.new_empty(x.shape))
        out, inner = yield from self.inner.reduce(x.copy_(u), state.inner, ctx)
        if ctx.lr != 0 and isinstance(out.sent, Sparse):  # at a rate of 0 nothing of it is applied
            out.sent.clear(u)
        return out, MomentumState(u, inner)


def running_mean(mu: float, method: Method) -> Method:
    """The running mean of each worker's gradients, in place of the last one."""
    return RunningMean(mu, method) if mu else method


def nesterov(mu: float, method: Method) -> Method:
    """Nesterov momentum on each worker, before ``method`` compresses."""
    return Nesterov(mu, method) if mu else method


def momentum_correction(mu: float, method: Method) -> Method:
    """Momentum on each worker, before ``method`` compresses; it starts anew at each coordinate that is sent."""
    return MomentumCorrection(mu, method) if mu else method
