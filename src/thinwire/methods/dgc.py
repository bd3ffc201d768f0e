"""Deep Gradient Compression. Lin, Han, Mao, Wang, Dally 2018, arXiv 1712.01887, Algorithm 4.

    g_i = gradient, clipped to a norm of ``clip`` / sqrt(W)
    u_i = mu u_i + g_i                       momentum correction
    v_i = v_i + u_i                          which is error feedback on u_i
    S_i = the places of the k largest |v_i|;   out = mean_i v_i[S_i]
    u_i, v_i = 0 at S_i                      momentum factor masking

k falls exponentially over the warm-up, from a quarter of the coordinates to ``ratio`` of them.

Departure: the gradient is clipped tensor by tensor, since a tensor leaves before the rest of the gradient is there. The
warm-up falls at every step rather than every epoch. Tensors that go dense keep their momentum uncut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.core.combine import Clip, Rule, error_feedback, where
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.momentum import momentum_correction
from thinwire.core.requests import Exchange
from thinwire.core.value import Sum
from thinwire.methods.topk import TopK

FIRST_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DGC(TopK):
    """Top-k with momentum correction, local clipping and a density that falls over a warm-up.

    Bytes: 8 ratio d (W-1), past the warm-up
    Use: top-k with momentum SGD, for long runs at 0.1 %.
    Avoid: short runs, of which the warm-up is a large part; many workers, since the bytes grow with W.
    """

    ratio: float = 0.001
    """Share of the coordinates that is sent, past the warm-up."""
    momentum: float = 0.9
    """Momentum on each worker; the optimizer's own is then 0."""
    clip: float = 0.0
    """Most norm of a tensor's gradient, of which a worker has the share 1/sqrt(W); 0 for no limit."""
    warmup_steps: int = 100
    """Steps over which the share falls from a quarter to ``ratio``."""

    def __post_init__(self) -> None:
        TopK.__post_init__(self)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if not self.clip >= 0:
            raise ValueError(f"clip must be at least 0, not {self.clip}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, not {self.warmup_steps}")

    def method(self) -> Method:
        corrected = momentum_correction(self.momentum, where(Rule(), error_feedback(self)))
        return LocalClip(self.clip, corrected) if self.clip else corrected

    def reduce(self, x: Tensor | Sum, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        return TopK(ratio=self.density(ctx.step)).reduce(x, state, ctx)

    def density(self, step: int) -> float:
        """The share of the coordinates that is sent at ``step``."""
        if step >= self.warmup_steps or self.ratio >= FIRST_RATIO:
            return self.ratio
        return FIRST_RATIO * math.pow(self.ratio / FIRST_RATIO, step / self.warmup_steps)


@dataclass(frozen=True, slots=True)
class LocalClip(Clip):
    """At ``limit`` / sqrt(W): the norm of a sum of W independent gradients grows with sqrt(W)."""

    def reduce(self, x: Tensor, state: Any, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        return Clip(self.limit / math.sqrt(ctx.world), self.inner).reduce(x, state, ctx)
