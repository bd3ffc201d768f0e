"""Power-SGD. Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727, Algorithm 1.

    M_i = gradient + error                       (n, m)
    P   = mean_i M_i Q;    P = orthogonalise(P)   (n, r)
    Q   = mean_i M_i^T P                          (m, r), reused at the next step
    out = P Q^T

Departure: the error is M_i - P Q_i^T, with this worker's own Q_i, where the paper subtracts the global P Q^T. Both
have the same mean over workers; the local one does not let the workers' errors drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from thinwire.core.method import Context, Reduced
from thinwire.core.requests import AllReduce, Batched, Exchange
from thinwire.core.value import Sum
from thinwire.methods.lowrank import LowRank, Product, orthogonalize, product, transposed_product


class PowerSGDState(NamedTuple):
    Q: Tensor  # (m, r)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD(LowRank):
    """Low rank by one power iteration a step: two all-reduces, P then Q.

    Bytes: 16 rank sqrt(d) (W-1)/W, for a square matrix; 8 rank (n + m) (W-1)/W for one of n x m
    Use: matrices, where ``acp`` lags: both factors are fresh at each step.
    Avoid: networks with delay: its two rounds wait for each other. Vectors, which go dense, and narrow matrices.
    """

    def init(self, x: Tensor, ctx: Context) -> PowerSGDState:
        n, m = x.flatten(1).shape
        return PowerSGDState(ctx.randn(m, min(self.rank, n, m), like=x, salt="Q"))

    def reduce(self, x: Tensor | Sum, state: PowerSGDState, ctx: Context) -> Exchange[tuple[Reduced, PowerSGDState]]:
        M = x.flatten(1)
        P = yield Batched(product, (M, state.Q))
        P = yield AllReduce(P)
        P = yield Batched(orthogonalize, P)
        Q_local = yield Batched(transposed_product, (M, P))
        Q = yield AllReduce(Q_local)
        return Reduced(Product(P, Q), sent=Product(P, Q_local)), PowerSGDState(Q)
