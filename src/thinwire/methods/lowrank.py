"""What the low-rank methods share: ACP-SGD (arXiv 2306.08881) and Power-SGD (arXiv 1905.13727)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from thinwire import kernels
from thinwire.core.combine import Rule, error_feedback, where
from thinwire.core.method import Method
from thinwire.core.value import Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank(Method):
    """Sends factors of a matrix; a tensor of more dimensions is a matrix with its first one as rows."""

    adds: ClassVar[bool] = True  # Inf and NaN times anything are neither finite nor lost in a sum: a factor shows them
    rank: int = 4
    """Columns of the factors; lower compresses more."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")

    @property
    def unmade(self) -> bool:
        return True

    def method(self) -> Method:
        return where(Rule(min_dims=2), error_feedback(self))


@dataclass(frozen=True, slots=True)
class Product:
    """P Q^T, in the shape of the memory that it is written to."""

    P: Tensor  # (n, r)
    Q: Tensor  # (m, r)

    def write(self, out: Tensor) -> None:
        kernels.write_product(self.P, self.Q, out.flatten(1))

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        if isinstance(p, Sum) and p.pending and p.error is out:
            kernels.subtract_product(p.x.flatten(1), out.flatten(1), p.ratio, self.P, self.Q)
        else:
            p = p.made() if isinstance(p, Sum) else p
            torch.addmm(p.flatten(1), self.P, self.Q.mT, alpha=-1, out=out.flatten(1))

    def finite(self) -> bool:
        if self.P.is_meta:
            return True
        # bounds every entry of the product; NaN compares with nothing
        return bool(vector_norm(self.P).item() * vector_norm(self.Q).item() <= torch.finfo(self.P.dtype).max)


def orthogonalize(P: Tensor) -> Tensor:  # (k, n, r) -> (k, n, r)
    """Orthonormal columns that span those of each P; a zero P gives some orthonormal columns, never NaN."""
    return kernels.orthogonalize(P)


def product(M: Tensor | Sum, Q: Tensor) -> Tensor:  # (n, m), (m, r) -> (n, r)
    """M Q; a sum is added in passing."""
    return kernels.product(M.x, M.error, M.ratio, Q) if isinstance(M, Sum) else M @ Q


def transposed_product(M: Tensor | Sum, P: Tensor) -> Tensor:  # (n, m), (n, r) -> (m, r)
    """M^T P, computed as (P^T M)^T: with few columns the direct form is many times slower on a CPU."""
    return kernels.transposed_product(M.x, M.error, M.ratio, P) if isinstance(M, Sum) else (P.mT @ M).mT
