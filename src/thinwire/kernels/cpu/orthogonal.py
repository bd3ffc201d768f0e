"""Orthonormal columns on the CPU: those of a factor are few, so that Gram-Schmidt is all that is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from thinwire.kernels.cpu.table import numbers

Array = np.ndarray[Any, Any]
# any order of additions, and multiply-add in one rounding: a matrix product promises neither
compiled = njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
inlined = njit(inline="always")


@compiled
def orthogonalize_each(places: Array, like: Array) -> None:
    for i in range(len(places)):
        at = places[i]
        n, r = at[2], at[3]
        P, out, columns = numbers(at[0], n * r, like), numbers(at[1], n * r, like), np.empty((r, n), like.dtype)
        for j in range(n):
            for k in range(r):
                columns[k, j] = P[j * r + k]
        _orthogonalize(columns)
        for j in range(n):
            for k in range(r):
                out[j * r + k] = columns[k, j]


@compiled
def _orthogonalize(columns: Array) -> None:
    """Gram-Schmidt twice over, by which what is left of a column is orthogonal to those before it, up to rounding."""
    for k in range(columns.shape[0]):
        own = columns[k]
        most = _largest(own)
        if most > 0:
            _divide(own, most)
        once = _project(columns, k)
        twice = _project(columns, k)
        unit = 0
        while once == 0 or twice < 0.5 * once:  # nothing is left but rounding: any other direction will do
            for j in range(len(own)):
                own[j] = j == unit
            once = max(_project(columns, k), 1 / np.sqrt(len(own)))  # some axis has that much left
            twice = _project(columns, k)
            unit += 1
        _divide(own, twice)


@compiled
def norms_each(places: Array, like: Array, norms: Array) -> None:
    for i in range(len(places)):
        a, total = numbers(places[i, 0], places[i, 1], like), 0.0
        for j in range(len(a)):
            total += np.float64(a[j]) * np.float64(a[j])
        norms[i] = np.sqrt(total)


@inlined
def _largest(a: Array) -> Any:
    most = a.dtype.type(0)
    for j in range(len(a)):
        most = max(most, abs(a[j]))
    return most


@inlined
def _divide(a: Array, by: Any) -> None:
    for j in range(len(a)):
        a[j] /= by


@compiled
def _project(columns: Array, k: int) -> Any:
    """Column k without its parts along the columns before it, all found at once; its norm."""
    own = columns[k]
    parts = np.empty(k, columns.dtype)
    for i in range(k):
        parts[i] = _dot(columns[i], own)
    for i in range(k):
        _add_scaled(own, -parts[i], columns[i])
    return np.sqrt(_dot(own, own))


@inlined
def _dot(a: Array, b: Array) -> float:
    total = 0.0
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@inlined
def _add_scaled(out: Array, alpha: Any, a: Array) -> None:
    for j in range(len(out)):
        out[j] += alpha * a[j]
