"""ACP-SGD. Zhang, Zhang, Shi, Chu, Li 2023, arXiv 2306.08881, Algorithm 1.

    M_i = gradient + error                                              (n, m)
    even turn:  Q = orthogonalise(Q);  P = mean_i M_i Q;    out = P Q^T
    odd turn:   P = orthogonalise(P);  Q = mean_i M_i^T P;  out = P Q^T

The factor that is orthogonalised came with the last step's answer, so compression waits for nothing and a step is one
all-reduce. With this worker's own factor in place of the mean, the error is M_i (I - Q Q^T), or (I - P P^T) M_i.

Departure: a turn is a tensor's own reduction rather than the global step, so that a parameter which takes part
only every other step still alternates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from thinwire.core.method import Context, Reduced
from thinwire.core.requests import AllReduce, Batched, Exchange
from thinwire.core.value import Sum
from thinwire.methods.lowrank import LowRank, Product, orthogonalize, product, transposed_product


class ACPState(NamedTuple):
    P: Tensor  # (n, r)
    Q: Tensor  # (m, r)
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ACP(LowRank):
    """Alternating low rank: one all-reduce a step, of P on even turns and of Q on odd ones.

    Bytes: 8 rank sqrt(d) (W-1)/W, for a square matrix; 4 rank (n + m) (W-1)/W for one of n x m
    Use: SGD with momentum on models of large matrices: one small all-reduce a step, which overlaps with backward.
    Avoid: Adam, under which it lags: see ``apm+acp``. Vectors, which go dense, and narrow matrices.
    """

    def init(self, x: Tensor, ctx: Context) -> ACPState:
        n, m = x.flatten(1).shape
        r = min(self.rank, n, m)
        return ACPState(ctx.randn(n, r, like=x, salt="P"), ctx.randn(m, r, like=x, salt="Q"))

    def reduce(self, x: Tensor | Sum, state: ACPState, ctx: Context) -> Exchange[tuple[Reduced, ACPState]]:
        M = x.flatten(1)
        if state.turn % 2 == 0:
            Q = yield Batched(orthogonalize, state.Q)
            P_local = yield Batched(product, (M, Q))
            P = yield AllReduce(P_local)
            sent = Product(P_local, Q)
        else:
            P = yield Batched(orthogonalize, state.P)
            Q_local = yield Batched(transposed_product, (M, P))
            Q = yield AllReduce(Q_local)
            sent = Product(P, Q_local)
        return Reduced(Product(P, Q), sent), ACPState(P, Q, state.turn + 1)
