"""Sketched-SGD. Ivkin, Rothchild, Ullah, Braverman, Stoica, Arora 2019, arXiv 1903.04488, Section 5.

    worker i   u_i = mu u_i + g_i;   v_i = v_i + u_i
    all        S = mean_i sketch(v_i)                              rows x cols, an all-reduce: sketches are linear
               P = the places of the p2 k largest estimates from S
               V = mean_i v_i[P]                                   a second all-reduce, of exact values
               out = V at the k largest |V|, zero elsewhere;       u_i, v_i = 0 there

sketch(x)[r, h_r(j)] = sum_j s_r(j) x_j with hashes h_r to columns and s_r to signs; the median over rows of
s_r(j) S[r, h_r(j)] estimates x_j, wrong by about |x|_2 / sqrt(cols). So the sketch finds what stands out of the noise
of all the rest; its size does not depend on the number of workers. Bytes: 2(W-1)/W 4 (rows cols + p2 k).

Departure: all-reduces take the place of the parameter server. p2 is 16, and cols by default 16 k, at which 0.9 of the
true top k of a language model's gradient are found; with p2 of 8, which saves a twelfth of the bytes, not always. v has
less of a tail than the gradient, since its largest numbers are taken off at each step; there fewer are found. The
hashes are new at each step, so that no two coordinates are confused for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thinwire import kernels
from thinwire.core.combine import error_feedback, whole
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.momentum import momentum_correction
from thinwire.core.requests import AllReduce, Exchange
from thinwire.core.value import Sparse
from thinwire.methods.topk import share


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch(Method):
    """The largest coordinates of the mean, found in a sketch of it, with error feedback: two all-reduces.

    Bytes: 8 (W-1)/W ratio d (16 rows + 16), by default; 8 (W-1)/W (rows cols + 16 ratio d)
    Use: many workers and gradients with a heavy tail: the bytes do not depend on W, and the top k are those of the
        mean.
    Avoid: gradients without a tail, where the noise hides them; slow processors, since every number is hashed ``rows``
        times.
    """

    ratio: float = 0.001
    """Share of the coordinates that is applied."""
    rows: int = 5
    """Hashes, an odd number: estimates are medians over them."""
    cols: int = 0
    """Columns of the sketch; 0 for 16 for each coordinate that is applied."""
    momentum: float = 0.0
    """Of each worker, until a coordinate is sent; the optimizer's own is then 0."""

    p2: ClassVar[int] = 16

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], not {self.ratio}")
        if self.rows < 1 or self.rows % 2 == 0:
            raise ValueError(f"rows must be odd and at least 1, not {self.rows}")
        if self.cols < 0:
            raise ValueError(f"cols must be at least 0, not {self.cols}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")

    def method(self) -> Method:
        return momentum_correction(self.momentum, whole(error_feedback(self)))

    def reduce(self, x: Tensor, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        v, d, key = x.flatten(), x.numel(), ctx.key(str(ctx.step))
        k = share(self.ratio, d)
        S = yield AllReduce(kernels.count_sketch(v, self.rows, self.cols or 16 * k, key))
        _, P = kernels.top_k(kernels.estimate(S, d, key), min(d, self.p2 * k))
        local = v[P]
        V = yield AllReduce(local)
        values, top = kernels.top_k(V, k)
        return Reduced(Sparse(P[top], values), sent=Sparse(P[top], local[top])), state
