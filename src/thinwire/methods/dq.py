"""DQ-SGD. Yan, Huang, Lan, Song 2021, arXiv 2107.14575: QSGD with bits that are chosen at each step.

Of step n's squared error alpha^(N-n) is left after N steps: bits are spent best if all steps then add alike to it.

    s_n = k alpha^((N-n)/2) |g_n| levels a side;   B_n = 1 + log2(s_n + 1) bits, in [2, 8]

Bits rise towards the end and fall with |g|^2 = mean_i sum over blocks of n |v|_max^2 (see ``qsgd``). k is set by
    target   the variance of the mean, E |out - g|^2 <= alpha^(n-N) target: k = 1 / sqrt(4 W target), bits rounded up
    budget   bits a number, on average over the run: k would just spend what is left if the norm stayed at its mean

Departure: a tensor has bits of its own. The norm is the last step's, read by all workers from the scales that they then
gathered, and constant to the price list. After ``total_steps`` a budget's bits are its mean. The levels count the sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.core.combine import Rule, where
from thinwire.core.lift import MeanDecoded
from thinwire.core.method import Context, Method, Reduced
from thinwire.core.requests import Exchange
from thinwire.methods.qsgd import check_block, quantised

FEWEST, MOST = 2, 8


class DQState(NamedTuple):
    norm: float = 0.0  # log2 |g| of the last step
    usual: float = 0.0  # its running mean, over a tenth of the run
    spent: float = 0.0  # bits a number
    seen: int = 0  # steps with a gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class DQ(Method):
    """QSGD with bits that rise towards the end of the run and fall with the gradient's norm.

    Bytes: (W-1) d (budget/8 + 4/block), on average over the run
    Use: runs of known length whose early errors fade. At equal bits it has not been shown to beat ``qsgd`` here.
    Avoid: many workers, as ``qsgd``; runs of unknown length.
    """

    widens: ClassVar[bool] = True
    budget: float = 4.0
    """Bits a number, on average over ``total_steps``; has no part where there is a target."""
    target: float = 0.0
    """Most variance, in squared gradient units, that the last step may add to a tensor's mean; 0 goes by the budget."""
    alpha: float = 0.995
    """What a step leaves of the squared error before it: about 1 - 2 x learning rate x curvature."""
    total_steps: int = 1000
    """Steps of the run."""
    block: int = 512
    """Numbers that share a scale, a multiple of 8."""

    def __post_init__(self) -> None:
        if not FEWEST <= self.budget <= MOST:
            raise ValueError(f"budget must be in [{FEWEST}, {MOST}], not {self.budget}")
        if not 0 <= self.target < math.inf:
            raise ValueError(f"target must be at least 0, not {self.target}")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], not {self.alpha}")
        if self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, not {self.total_steps}")
        check_block(self.block)

    def method(self) -> Method:
        return where(Rule(min_saving=1.0), self)

    def init(self, x: Tensor, ctx: Context) -> DQState:
        return DQState()

    def reduce(self, x: Tensor, state: DQState, ctx: Context) -> Exchange[tuple[Reduced, DQState]]:
        bits = self.bits(state, ctx)
        out, _ = yield from quantised(bits, self.block, ctx).reduce(x, (), ctx)
        assert isinstance(out.mean, MeanDecoded)
        return out, self._after(state, bits, out.mean.payload[0], x.numel())

    def bits(self, state: DQState, ctx: Context) -> int:
        """B_n, from what all workers know alike."""
        left = max(0, self.total_steps - ctx.step)
        faded = left / 2 * math.log2(self.alpha)
        if self.target:
            levels = state.norm - math.log2(4 * ctx.world * self.target) / 2 + faded
            return math.ceil(_bits(levels) - 1e-9) if state.seen else MOST
        if not left:
            return round(self.budget)
        share = (self.budget * self.total_steps - state.spent) / left
        return round(_bits(self._usual_levels(share, left) + state.norm - state.usual + faded))

    def _usual_levels(self, share: float, left: int) -> float:
        """log2(k |g|) for the usual norm: the mean of the bits over what is left of the run is the share."""
        ahead = [left * (i + 0.5) / 16 / 2 * math.log2(self.alpha) for i in range(16)]
        low, high = 0.0, MOST - ahead[-1]
        for _ in range(12):
            middle = (low + high) / 2
            enough = sum(_bits(middle + faded) for faded in ahead) >= share * len(ahead)
            low, high = (low, middle) if enough else (middle, high)
        return high

    def _after(self, state: DQState, bits: int, scales: Tensor, d: int) -> DQState:
        spent = state.spent + bits
        sizes = torch.full_like(scales[0], self.block)
        sizes[-1] = d - self.block * (len(sizes) - 1)
        squared = math.nan if scales.is_meta else (scales.double().square() * sizes).sum(1).mean().item()
        if not 0 < squared < math.inf:
            return state._replace(spent=spent)
        norm = math.log2(squared) / 2
        rate = max(1 / (state.seen + 1), min(1.0, 10 / self.total_steps))
        return DQState(norm, state.usual + rate * (norm - state.usual), spent, state.seen + 1)


def _bits(levels: float) -> float:
    """For log2 of the levels a side."""
    return min(MOST, max(FEWEST, 1 + math.log2(2 ** min(levels, MOST) + 1)))
