"""QSGD. Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, arXiv 1610.02132, Section 3.

    for each block v, with s = 2^(bits-1) - 1 levels a side:
    Q(v_j) = |v| sign(v_j) l_j / s,    l_j = floor(a_j) or floor(a_j) + 1 at random, so that E l_j = a_j = s |v_j| / |v|
    out = mean_i Q(g_i)

Each worker gathers the others' codes: (W-1) d bits/8 bytes, and a scale for each block. Unbiased, so no error is kept.

|v| is the largest magnitude of the block, or its 2-norm: the paper proposes both. With codes of a fixed width there is
nothing to gain from the zeros that the 2-norm makes, and the other's levels lie closer by |v|_2 / |v|_max:

    E |Q(v) - v|^2 <= min(n / (4 s^2) |v|^2,  |v| |v|_1 / s)                                  n numbers in the block

Departure: codes have a fixed width in place of Elias coding. Where gathering costs no less than an all-reduce, as with
4 bits from 16 workers on, tensors go dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

from torch import Tensor

from thinwire import kernels
from thinwire.core.combine import Rule, where
from thinwire.core.lift import gathered
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import Exchange
from thinwire.core.value import Sum, finite_each


class Levels(NamedTuple):
    scale: Tensor  # (rows, ceil(columns / block))
    codes: Tensor  # (rows, ceil(columns * bits / 8)) uint8


@dataclass(frozen=True, slots=True)
class StochasticLevels:
    """Q above, with the random numbers of ``key``: a compressor for one tensor, step and worker."""

    unmade: ClassVar[bool] = False
    fused: ClassVar[bool] = False
    bits: int
    block: int
    norm: float
    key: int

    def encode(self, batch: Sequence[tuple[Tensor | Sum, int, int]]) -> list[Levels]:
        given = [(x.flatten(), rows, columns) for x, rows, columns in batch]
        return [Levels(*kernels.encode_levels(*one, self.block, self.bits, self.norm, self.key)) for one in given]

    def decode(self, batch: Sequence[tuple[Levels, int, Tensor]]) -> None:
        self.add([(payload, columns, out.zero_(), 1.0, out, False) for payload, columns, out in batch])

    def add(self, batch: Sequence[tuple[Levels, int, Tensor, float, Tensor, bool]]) -> None:
        for payload, columns, base, alpha, out, stacked in batch:
            kernels.add_levels(*payload, columns, self.block, self.bits, base, alpha, out, stacked)

    def finite(self, batch: Sequence[Levels]) -> list[bool]:
        return finite_each([payload.scale for payload in batch])


def quantised(bits: int, block: int, norm: float, ctx: Context) -> Method:
    """The mean of all workers' Q; each rounds by chances of its own, which a resumed run meets again."""
    return gathered(StochasticLevels(bits, block, norm, ctx.key(f"{ctx.step}/{ctx.rank}")))


def check_block(block: int, norm: float) -> None:
    if block < 8 or block % 8:
        raise ValueError(f"block must be a multiple of 8, not {block}")
    if norm not in (2, inf):
        raise ValueError(f"norm must be 2 or inf, not {norm}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QSGD(Method):
    """Unbiased stochastic rounding to a fixed number of bits; one-way.

    Bytes: (W-1) d (bits/8 + 4/block)
    Use: few workers, where the mean must stay unbiased and no error may be kept.
    Avoid: more than 4 workers: the bytes grow with W. ``dist-ef-block`` sends 4x fewer at 4 workers.
    """

    widens: ClassVar[bool] = True
    bits: int = 4
    """Bits a number, the sign's included: 2 to 8."""
    block: int = 512
    """Numbers that share a scale, a multiple of 8."""
    norm: float = inf
    """Of a block, which is its scale: inf, the largest magnitude, or 2."""

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be in [2, 8], not {self.bits}")
        check_block(self.block, self.norm)

    def method(self) -> Method:
        return where(Rule(min_saving=1.0), self)

    def reduce(self, x: Tensor, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        return quantised(self.bits, self.block, self.norm, ctx).reduce(x, state, ctx)
