"""The low-rank kernels on the CPU: numba loops that read gradient and error where they lie, in one pass.

The loops (``factors``) take four columns of a factor at a time: ranks are filled up with zeros to a multiple of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu import factors
from thinwire.kernels.cpu.factors import U
from thinwire.kernels.cpu.orthogonal import Array, compiled
from thinwire.kernels.cpu.orthogonal import orthogonalize as orthogonalize
from thinwire.kernels.cpu.table import LIKE, Table, numbers

LONG = 4096
"""Bytes of a row from which four rows share a reading of the factor: it no longer stays in the nearest cache while the
matrix streams by. Shorter rows, four at a time, would hide from the machine that memory is read in order."""

Factor = tuple[Tensor, Tensor, float, Tensor]


def product(x: Tensor, error: Tensor, ratio: float, Q: Tensor) -> Tensor:
    return product_each([(x, error, ratio, Q)])[0]


def product_each(batch: Sequence[Factor]) -> list[Tensor]:
    table, found = Table(), []
    for x, error, ratio, Q in batch:
        found.append(error.new_empty(x.shape[0], Q.shape[1]))
        table.add((x.dtype, error.dtype), (*_sum_at(table, x, error), *_factors_at(table, found[-1], Q)), (ratio,))
    for (narrow, wide), places, ratios in table:
        _product_each(places, ratios, LIKE[narrow], LIKE[wide])
    return found


def transposed_product(x: Tensor, error: Tensor, ratio: float, P: Tensor) -> Tensor:
    return transposed_product_each([(x, error, ratio, P)])[0]


def transposed_product_each(batch: Sequence[Factor]) -> list[Tensor]:
    table, found = Table(), []
    for x, error, ratio, P in batch:
        found.append(error.new_empty(x.shape[1], P.shape[1]))
        table.add((x.dtype, error.dtype), (*_sum_at(table, x, error), *_factors_at(table, P, found[-1])), (ratio,))
    for (narrow, wide), places, ratios in table:
        _transposed_product_each(places, ratios, LIKE[narrow], LIKE[wide])
    return found


def subtract_product(x: Tensor, error: Tensor, ratio: float, P: Tensor, Q: Tensor) -> None:
    subtract_product_each([(x, error, ratio, P, Q)])


def subtract_product_each(batch: Sequence[tuple[Tensor, Tensor, float, Tensor, Tensor]]) -> None:
    table = Table()
    for x, error, ratio, P, Q in batch:
        assert error.is_contiguous()
        table.add((x.dtype, error.dtype), (*_sum_at(table, x, error), *_factors_at(table, P, Q)), (ratio,))
    for (narrow, wide), places, ratios in table:
        _subtract_product_each(places, ratios, LIKE[narrow], LIKE[wide])


def write_product(P: Tensor, Q: Tensor, out: Tensor) -> None:
    write_product_each([(P, Q, out)])


def write_product_each(batch: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    table = Table()
    for P, Q, out in batch:
        assert out.is_contiguous()
        table.add(out.dtype, (out.data_ptr(), *_factors_at(table, P, Q)))
    for wide, places, _ in table:
        _write_product_each(places, LIKE[wide])


def _sum_at(table: Table, x: Tensor, error: Tensor) -> tuple[int, int]:
    assert x.shape == error.shape
    return table.at(x), table.at(error)


def _factors_at(table: Table, P: Tensor, Q: Tensor) -> tuple[int, ...]:
    (n, r), (m, _) = P.shape, Q.shape
    return table.at(P), table.at(Q), n, m, r


@compiled
def _rows(Q: Array, r: Any) -> Array:
    """The columns of Q end to end, and as many of zeros as fill up the rank."""
    m = len(Q) // r
    rows = np.zeros((r + 3) // 4 * 4 * m, Q.dtype)
    for j in range(m):
        for k in range(r):
            rows[k * m + j] = Q[j * r + k]
    return rows


@compiled
def _filled(P: Array, r: Any) -> Array:
    """P with as many columns of zeros as fill up the rank."""
    if r % 4 == 0:
        return P
    n, filled = len(P) // r, (r + 3) // 4 * 4
    found = np.zeros(n * filled, P.dtype)
    for i in range(n):
        found[i * filled : i * filled + r] = P[i * r : (i + 1) * r]
    return found


@compiled
def _sizes(m: Any, r: Any, wide: Array) -> Any:
    """m, the filled rank, and whether four rows of the matrix are to share a reading of the factor."""
    return U(m), U((r + 3) // 4 * 4), m * wide.itemsize >= LONG


@compiled
def _product_each(places: Array, ratios: Array, like: Array, wide: Array) -> None:
    for i in range(len(places)):
        at, ratio = places[i], wide.dtype.type(ratios[i, 0])
        n, m, r = at[4], at[5], at[6]
        x, e, P = numbers(at[0], n * m, like), numbers(at[1], n * m, wide), numbers(at[2], n * r, wide)
        filled = _filled(P, r)
        factors.product(x, e, ratio, _rows(numbers(at[3], m * r, wide), r), filled, *_sizes(m, r, wide))
        for j in range(n if r % 4 else 0):
            P[j * r : (j + 1) * r] = filled[j * (len(filled) // n) :][:r]


@compiled
def _transposed_product_each(places: Array, ratios: Array, like: Array, wide: Array) -> None:
    for i in range(len(places)):
        at, ratio = places[i], wide.dtype.type(ratios[i, 0])
        n, m, r = at[4], at[5], at[6]
        x, e, P = numbers(at[0], n * m, like), numbers(at[1], n * m, wide), numbers(at[2], n * r, wide)
        Q, rows = numbers(at[3], m * r, wide), np.zeros((r + 3) // 4 * 4 * m, wide.dtype)
        factors.transposed_product(x, e, ratio, _filled(P, r), rows, *_sizes(m, r, wide))
        for j in range(m):
            for k in range(r):
                Q[j * r + k] = rows[k * m + j]


@compiled
def _subtract_product_each(places: Array, ratios: Array, like: Array, wide: Array) -> None:
    for i in range(len(places)):
        at, ratio = places[i], wide.dtype.type(ratios[i, 0])
        n, m, r = at[4], at[5], at[6]
        x, e = numbers(at[0], n * m, like), numbers(at[1], n * m, wide)
        P, rows = numbers(at[2], n * r, wide), _rows(numbers(at[3], m * r, wide), r)
        factors.subtract_product(x, e, ratio, _filled(P, r), rows, *_sizes(m, r, wide))


@compiled
def _write_product_each(places: Array, wide: Array) -> None:
    for i in range(len(places)):
        at = places[i]
        n, m, r = at[3], at[4], at[5]
        P, rows = numbers(at[1], n * r, wide), _rows(numbers(at[2], m * r, wide), r)
        factors.write_product(_filled(P, r), rows, numbers(at[0], n * m, wide), *_sizes(m, r, wide))
