"""The low-rank kernels on the CPU: numba loops that read gradient and error where they lie, in one pass.

The loops (``factors``) take four columns of a factor at a time: ranks are filled up with zeros to a multiple of four.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu import factors, orthogonal
from thinwire.kernels.cpu.table import LIKE, Table

Factor = tuple[Tensor, Tensor, float, Tensor]


def orthogonalize(P: Tensor) -> Tensor:
    return orthogonalize_each([(P,)])[0]


def orthogonalize_each(batch: Sequence[tuple[Tensor]]) -> list[Tensor]:
    table, found = Table(), []
    for (P,) in batch:
        found.append(P.new_empty(P.shape))
        table.add(P.dtype, (table.at(P), found[-1].data_ptr(), *P.shape))
    for wide, places, _ in table:
        orthogonal.orthogonalize_each(places, LIKE[wide])
    return found


def bounded(P: Tensor, Q: Tensor) -> bool:
    return bounded_each([(P, Q)])[0]


def bounded_each(batch: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    table, found = Table(), {}
    for P, Q in batch:
        for factor in (P, Q):
            table.add(P.dtype, (table.at(factor), factor.numel()))
    for wide, places, _ in table:
        norms = np.empty(len(places))
        orthogonal.norms_each(places, LIKE[wide], norms)
        found[wide] = iter((norms[::2] * norms[1::2] <= torch.finfo(wide).max).tolist())
    return [next(found[P.dtype]) for P, _ in batch]


def product(x: Tensor, error: Tensor, ratio: float, Q: Tensor) -> Tensor:
    return product_each([(x, error, ratio, Q)])[0]


def product_each(batch: Sequence[Factor]) -> list[Tensor]:
    table, found = Table(), []
    for x, error, ratio, Q in batch:
        found.append(error.new_empty(x.shape[0], Q.shape[1]))
        table.add((x.dtype, error.dtype), (*_sum_at(table, x, error), *_factors_at(table, found[-1], Q)), (ratio,))
    for (narrow, wide), places, ratios in table:
        factors.product_each(places, ratios, LIKE[narrow], LIKE[wide])
    return found


def transposed_product(x: Tensor, error: Tensor, ratio: float, P: Tensor) -> Tensor:
    return transposed_product_each([(x, error, ratio, P)])[0]


def transposed_product_each(batch: Sequence[Factor]) -> list[Tensor]:
    table, found = Table(), []
    for x, error, ratio, P in batch:
        found.append(error.new_empty(x.shape[1], P.shape[1]))
        table.add((x.dtype, error.dtype), (*_sum_at(table, x, error), *_factors_at(table, P, found[-1])), (ratio,))
    for (narrow, wide), places, ratios in table:
        factors.transposed_product_each(places, ratios, LIKE[narrow], LIKE[wide])
    return found


def subtract_product(x: Tensor, error: Tensor, ratio: float, P: Tensor, Q: Tensor) -> None:
    subtract_product_each([(x, error, ratio, P, Q)])


def subtract_product_each(batch: Sequence[tuple[Tensor, Tensor, float, Tensor, Tensor]]) -> None:
    table = Table()
    for x, error, ratio, P, Q in batch:
        assert error.is_contiguous()
        table.add((x.dtype, error.dtype), (*_sum_at(table, x, error), *_factors_at(table, P, Q)), (ratio,))
    for (narrow, wide), places, ratios in table:
        factors.subtract_product_each(places, ratios, LIKE[narrow], LIKE[wide])


def settle_product(x: Tensor, error: Tensor, ratio: float, P: Tensor, Q: Tensor, M: Tensor, N: Tensor) -> None:
    settle_product_each([(x, error, ratio, P, Q, M, N)])


def settle_product_each(batch: Sequence[tuple[Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor]]) -> None:
    table = Table()
    for x, error, ratio, P, Q, M, N in batch:
        assert x.is_contiguous()
        assert error.is_contiguous()
        assert x.dtype == error.dtype
        assert (M.shape, N.shape) == (P.shape, Q.shape)
        mean = table.at(M), table.at(N)
        table.add(x.dtype, (*_sum_at(table, x, error), *_factors_at(table, P, Q), *mean), (ratio,))
    for wide, places, ratios in table:
        factors.settle_product_each(places, ratios, LIKE[wide])


def write_product(P: Tensor, Q: Tensor, out: Tensor) -> None:
    write_product_each([(P, Q, out)])


def write_product_each(batch: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    table = Table()
    for P, Q, out in batch:
        assert out.is_contiguous()
        table.add(out.dtype, (out.data_ptr(), *_factors_at(table, P, Q)))
    for wide, places, _ in table:
        factors.write_product_each(places, LIKE[wide])


def _sum_at(table: Table, x: Tensor, error: Tensor) -> tuple[int, int]:
    assert x.shape == error.shape
    return table.at(x), table.at(error)


def _factors_at(table: Table, P: Tensor, Q: Tensor) -> tuple[int, ...]:
    (n, r), (m, _) = P.shape, Q.shape
    return table.at(P), table.at(Q), n, m, r
