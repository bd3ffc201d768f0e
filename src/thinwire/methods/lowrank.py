"""What the low-rank methods share: ACP-SGD (arXiv 2306.08881) and Power-SGD (arXiv 1905.13727)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.combine import Rule, error_feedback, where
from thinwire.core.method import Method
from thinwire.core.value import Sum, settled


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


@dataclass(slots=True)
class Product:
    """P Q^T, in the shape of the memory that it is written to."""

    P: Tensor  # (n, r)
    Q: Tensor  # (m, r)
    known: bool | None = None
    """Whether it is finite, where that has been found out."""

    def write(self, out: Tensor) -> None:
        self.write_each([(self, out)])

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        self.subtract_each([(self, p, out)])

    @staticmethod
    def write_each(batch: Sequence[tuple[Product, Tensor]]) -> None:
        kernels.write_product([(value.P, value.Q, out.flatten(1)) for value, out in batch])

    @staticmethod
    def subtract_each(batch: Sequence[tuple[Product, Tensor | Sum, Tensor]]) -> None:
        unmade = []
        for value, p, out in batch:
            if isinstance(p, Sum) and p.pending and p.error is out:
                unmade.append((p.x.flatten(1), out.flatten(1), p.ratio, value.P, value.Q))
            else:
                torch.addmm(settled(p).flatten(1), value.P, value.Q.mT, alpha=-1, out=out.flatten(1))
        kernels.subtract_product(unmade)

    @staticmethod
    def settle_each(batch: Sequence[tuple[Product, Product, Sum]]) -> None:
        flat = [(sent, mean, p.flatten(1)) for sent, mean, p in batch]
        kernels.settle_product([(p.x, p.error, p.ratio, sent.P, sent.Q, mean.P, mean.Q) for sent, mean, p in flat])

    def finite(self) -> bool:
        return self.finite_each([self])[0]

    @staticmethod
    def finite_each(values: Sequence[Product]) -> list[bool]:
        unknown = [value for value in values if value.known is None]
        if unknown:
            meta = unknown[0].P.is_meta
            found = repeat(True) if meta else kernels.bounded([(value.P, value.Q) for value in unknown])
            for value, known in zip(unknown, found, strict=False):
                value.known = known
        return [value.known is True for value in values]


def orthogonalize(batch: Sequence[Tensor]) -> list[Tensor]:  # (n, r) -> (n, r)
    """Orthonormal columns that span those of each P; a zero P gives some orthonormal columns, never NaN."""
    return kernels.orthogonalize(batch)


def product(batch: Sequence[tuple[Tensor | Sum, Tensor]]) -> list[Tensor]:  # (n, m), (m, r) -> (n, r)
    """M Q; a sum is added in passing."""
    sums = iter(kernels.product([(M.x, M.error, M.ratio, Q) for M, Q in batch if isinstance(M, Sum)]))
    return [next(sums) if isinstance(M, Sum) else M @ Q for M, Q in batch]


def transposed_product(batch: Sequence[tuple[Tensor | Sum, Tensor]]) -> list[Tensor]:  # (n, m), (n, r) -> (m, r)
    """M^T P, computed as (P^T M)^T: with few columns the direct form is many times slower on a CPU."""
    sums = iter(kernels.transposed_product([(M.x, M.error, M.ratio, P) for M, P in batch if isinstance(M, Sum)]))
    return [next(sums) if isinstance(M, Sum) else (P.mT @ M).mT for M, P in batch]
