"""DQ-SGD. Yan, Huang, Lan, Song 2021, arXiv 2107.14575: QSGD with bits that are chosen at each step.

Of step n's squared error w_n = alpha^(N-n) is left after N steps; bits are spent best if all steps then add alike.

    s_n = k w_n^(1/2) |g_n| levels a side;   B_n = 1 + log2(s_n + 1) bits, in [2, 8]

Bits rise towards the end and fall with |g|^2 = mean_i sum over blocks of n |v|^2 (see ``qsgd``). k is set by
    target   the variance of the mean, E |out - g|^2 <= target / w_n: k = 1 / sqrt(4 W target), bits rounded up
    budget   bits a number, on average over the run: k would just spend what is left if the norm stayed at its mean

Departure: a network has curvatures of all sizes, and no one alpha. Unless one is given, w_n is the mean over all from 0
to 1, 1 / (N-n+1). What rounding takes off a budget's bits comes back at later steps. A tensor has bits of its own. The
norm is the last step's, from the scales that all workers gathered then, and constant to the price list.
"""

from __future__ import annotations

import math
from bisect import bisect_left
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
    owed: float = 0.0  # what rounding has taken off them
    seen: int = 0  # steps with a gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class DQ(Method):
    """QSGD with bits that rise towards the end of the run and fall with the gradient's norm.

    Bytes: (W-1) d (budget/8 + 4/block), on average over the run
    Use: runs of known length at a constant, high rate, where it ends below ``qsgd`` at equal bits.
    Avoid: many workers, as ``qsgd``; runs of unknown length.
    """

    widens: ClassVar[bool] = True
    budget: float = 4.0
    """Bits a number, on average over ``total_steps``; has no part where there is a target."""
    target: float = 0.0
    """Most variance, in squared gradient units, that the last step may add to a tensor's mean; 0 goes by the budget."""
    alpha: float = 0.0
    """What a step leaves of the squared error before it, about 1 - 2 x learning rate x curvature; 0 for all sizes."""
    total_steps: int = 1000
    """Steps of the run."""
    block: int = 512
    """Numbers that share a scale, a multiple of 8."""
    norm: float = math.inf
    """Of a block, which is its scale: inf, the largest magnitude, or 2."""

    def __post_init__(self) -> None:
        ranges = {"budget": (FEWEST, MOST), "target": (0, 1e30), "alpha": (0, 1), "total_steps": (1, math.inf)}
        for key, (low, high) in ranges.items():
            if not low <= getattr(self, key) <= high:
                raise ValueError(f"{key} must be in [{low}, {high}], not {getattr(self, key)}")
        check_block(self.block, self.norm)

    def method(self) -> Method:
        return where(Rule(min_saving=1.0), self)

    def init(self, x: Tensor, ctx: Context) -> DQState:
        return DQState()

    def reduce(self, x: Tensor, state: DQState, ctx: Context) -> Exchange[tuple[Reduced, DQState]]:
        wanted = self.wanted(state, ctx)
        bits = min(MOST, max(FEWEST, round(wanted + state.owed)))
        out, _ = yield from quantised(bits, self.block, self.norm, ctx).reduce(x, (), ctx)
        assert isinstance(out.mean, MeanDecoded)
        state = state._replace(spent=state.spent + bits, owed=state.owed + wanted - bits)
        return out, self._seen(state, out.mean.payload[0], x.numel())

    def wanted(self, state: DQState, ctx: Context) -> float:
        """B_n, of a budget before it is rounded, from what all workers know alike."""
        left = max(0, self.total_steps - ctx.step)
        if self.target:
            levels = state.norm - math.log2(4 * ctx.world * self.target) / 2 + self._faded(left)
            return math.ceil(_bits(levels) - 1e-9) if state.seen else MOST
        if not left:
            return self.budget
        share = (self.budget * self.total_steps - state.spent - state.owed) / left
        return _bits(self._usual_levels(share, left) + state.norm - state.usual + self._faded(left))

    def _faded(self, left: float) -> float:  # log2(w_n) / 2
        return left / 2 * math.log2(self.alpha) if self.alpha else -math.log2(left + 1) / 2

    def _usual_levels(self, share: float, left: int) -> float:
        """log2(k |g|) for the usual norm: the mean of the bits over what is left of the run is the share."""
        ahead = [self._faded(left * (i + 0.5) / 16) for i in range(16)]
        grid = range(64 * math.ceil(MOST - ahead[-1]))
        return bisect_left(grid, 16 * share, key=lambda at: sum(_bits(at / 64 + faded) for faded in ahead)) / 64

    def _seen(self, state: DQState, scales: Tensor, d: int) -> DQState:
        sizes = torch.full_like(scales[0], self.block)
        sizes[-1] = d - self.block * (len(sizes) - 1)
        squared = math.nan if scales.is_meta else (scales.double().square() * sizes).sum(1).mean().item()
        if not 0 < squared < math.inf:
            return state
        norm = math.log2(squared) / 2
        rate = max(1 / (state.seen + 1), min(1.0, 10 / self.total_steps))
        return state._replace(norm=norm, usual=state.usual + rate * (norm - state.usual), seen=state.seen + 1)


def _bits(levels: float) -> float:
    """For log2 of the levels a side."""
    return min(MOST, max(FEWEST, 1 + math.log2(2 ** min(levels, MOST) + 1)))
