"""Linear algebra that the low-rank methods share."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonalize(P: Tensor) -> Tensor:  # (..., n, r) -> (..., n, r)
    """Orthonormal columns that span those of P; a zero P gives some orthonormal columns, never NaN."""
    Q: Tensor = torch.linalg.qr(P).Q
    return Q


def transposed_product(M: Tensor, P: Tensor) -> Tensor:  # (..., n, m), (..., n, r) -> (..., m, r)
    """M^T P, computed as (P^T M)^T: with few columns the direct form is many times slower on a CPU."""
    return (P.mT @ M).mT
