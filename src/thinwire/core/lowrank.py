"""What the low-rank methods share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.combine import Rule, error_feedback, where
from thinwire.core.method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank(Method):
    """Sends factors of a matrix; a tensor of more dimensions is a matrix with its first one as rows."""

    rank: int = 4
    """Columns of the factors; lower compresses more."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")

    def method(self) -> Method:
        return where(Rule(min_dims=2), error_feedback(self))


def orthogonalize(P: Tensor) -> Tensor:  # (..., n, r) -> (..., n, r)
    """Orthonormal columns that span those of P; a zero P gives some orthonormal columns, never NaN."""
    Q: Tensor = torch.linalg.qr(P).Q
    return Q


def transposed_product(M: Tensor, P: Tensor) -> Tensor:  # (..., n, m), (..., n, r) -> (..., m, r)
    """M^T P, computed as (P^T M)^T: with few columns the direct form is many times slower on a CPU."""
    return (P.mT @ M).mT
