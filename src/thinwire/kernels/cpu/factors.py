"""The loops of the low-rank kernels.

Four columns of a factor are taken at a time. Factors are laid out as rows of the matrix's length. Places are counted in
unsigned numbers: numba would look at each signed one for being negative, and the loops would not become vector
instructions. Nor would some that write, if they were not functions of their own; what else is called is inlined, which
compiles in half the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from thinwire.kernels.cpu.orthogonal import Array, compiled, inlined
from thinwire.kernels.cpu.table import numbers
from thinwire.kernels.cpu.vector import LINE, prefetch

U = np.uintp
LONG = 4096
"""Bytes of a row beyond which four rows share a reading of the factor: it no longer stays in the nearest cache while
the matrix streams by. Shorter rows, four at a time, would hide from the machine that memory is read in order."""
SHORT = 2048
"""Bytes of a row up to which asking for the next one while this one is multiplied does not hold up more than it
spares."""


def _wide(a: Any) -> Any:
    """A number as it was read: bfloat16 comes as int16, float16 as uint16."""


@overload(_wide)
def _wide_of(a: Any) -> Any:
    return {types.int16: _brain, types.uint16: _half}.get(a, _same)


def _brain(a: Any) -> Any:
    return np.uint32(np.uint32(a) << np.uint32(16)).view(np.float32)


def _half(a: Any) -> Any:
    size = np.uint32(np.uint32(a & 0x7FFF) << np.uint32(13))
    special = np.uint32(size | np.uint32(0x7F800000)).view(np.float32)  # Inf or NaN
    value = special if a & 0x7C00 == 0x7C00 else size.view(np.float32) * np.float32(2.0**112)
    return -value if a & 0x8000 else value


def _same(a: Any) -> Any:
    return a


@inlined
def _pitch(m: Any) -> Any:
    """From one row of a factor to the next: each starts at a line, or every vector that is read would lie in two, and
    not a multiple of 4096 bytes apart, or all would want the same place in the nearest cache."""
    return (m // U(LINE // 4) + U(2)) * U(LINE // 4)


@inlined
def _shape(x: Array, q: Array, columns: Any) -> Any:
    """n, m and the filled rank."""
    m = U(columns)
    return U(len(x)) // m, m, U(len(q)) // _pitch(m)


@inlined
def _shared(q: Array, m: Any) -> Any:
    return m * U(q.itemsize) > U(LONG)


@inlined
def _fetch(x: Array, e: Array, at: Any, m: Any) -> None:
    """Ask for a short row before its turn: the machine does not look as far ahead while it computes."""
    for j in range(U(0), m, U(LINE // x.itemsize)):
        prefetch(x, at + j)
    for j in range(U(0), m, U(LINE // e.itemsize)):
        prefetch(e, at + j)


@inlined
def _product(x: Array, e: Array, ratio: Any, q: Array, P: Array, columns: Any) -> None:
    n, m, r = _shape(x, q, columns)
    even = n - n % U(4) if _shared(q, m) else U(0)
    for i in range(U(0), even, U(4)):
        for k in range(U(0), r, U(4)):
            _dots_of_four(x, e, ratio, i * m, q, k * _pitch(m), m, P, i * r + k, r)
    for i in range(even, n):
        if m * U(e.itemsize) <= U(SHORT):
            _fetch(x, e, (i + U(1)) * m, m)
        for k in range(U(0), r, U(4)):
            _dots(x, e, ratio, i * m, q, k * _pitch(m), m, P, i * r + k)


@inlined
def _dots(x: Array, e: Array, ratio: Any, at: Any, q: Array, k0: Any, m: Any, P: Array, to: Any) -> None:
    s = _pitch(m)
    k1, k2, k3 = k0 + s, k0 + U(2) * s, k0 + U(3) * s
    a0 = a1 = a2 = a3 = P.dtype.type(0)
    for j in range(m):
        a = _wide(x[at + j]) + ratio * e[at + j]
        a0 += a * q[k0 + j]
        a1 += a * q[k1 + j]
        a2 += a * q[k2 + j]
        a3 += a * q[k3 + j]
    _put(P, to, a0, a1, a2, a3)


@inlined
def _dots_of_four(
    x: Array, e: Array, ratio: Any, at: Any, q: Array, k0: Any, m: Any, P: Array, to: Any, r: Any
) -> None:
    s = _pitch(m)
    k1, k2, k3 = k0 + s, k0 + U(2) * s, k0 + U(3) * s
    bt, ct, dt = at + m, at + U(2) * m, at + U(3) * m
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = P.dtype.type(0)
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = P.dtype.type(0)
    for j in range(m):
        a = _wide(x[at + j]) + ratio * e[at + j]
        b = _wide(x[bt + j]) + ratio * e[bt + j]
        c = _wide(x[ct + j]) + ratio * e[ct + j]
        d = _wide(x[dt + j]) + ratio * e[dt + j]
        q0, q1, q2, q3 = q[k0 + j], q[k1 + j], q[k2 + j], q[k3 + j]
        a0, a1, a2, a3 = a0 + a * q0, a1 + a * q1, a2 + a * q2, a3 + a * q3
        b0, b1, b2, b3 = b0 + b * q0, b1 + b * q1, b2 + b * q2, b3 + b * q3
        c0, c1, c2, c3 = c0 + c * q0, c1 + c * q1, c2 + c * q2, c3 + c * q3
        d0, d1, d2, d3 = d0 + d * q0, d1 + d * q1, d2 + d * q2, d3 + d * q3
    _put(P, to, a0, a1, a2, a3)
    _put(P, to + r, b0, b1, b2, b3)
    _put(P, to + U(2) * r, c0, c1, c2, c3)
    _put(P, to + U(3) * r, d0, d1, d2, d3)


@compiled
def _four(P: Array, at: Any) -> Any:
    return P[at], P[at + U(1)], P[at + U(2)], P[at + U(3)]


@compiled
def _put(P: Array, to: Any, a0: Any, a1: Any, a2: Any, a3: Any) -> None:
    P[to], P[to + U(1)], P[to + U(2)], P[to + U(3)] = a0, a1, a2, a3


@inlined
def _transposed_product(x: Array, e: Array, ratio: Any, P: Array, q: Array, columns: Any) -> None:
    n, m, r = _shape(x, q, columns)
    even = n - n % U(4) if _shared(q, m) else U(0)
    for i in range(U(0), even, U(4)):
        for k in range(U(0), r, U(4)):
            _add_four_rows(x, e, ratio, i * m, P, i * r + k, r, q, k * _pitch(m), m)
    for i in range(even, n):
        if m * U(e.itemsize) <= U(SHORT):
            _fetch(x, e, (i + U(1)) * m, m)
        for k in range(U(0), r, U(4)):
            _add_row(x, e, ratio, i * m, P, i * r + k, q, k * _pitch(m), m)


@compiled
def _add_row(x: Array, e: Array, ratio: Any, at: Any, P: Array, to: Any, q: Array, k0: Any, m: Any) -> None:
    s = _pitch(m)
    k1, k2, k3 = k0 + s, k0 + U(2) * s, k0 + U(3) * s
    a0, a1, a2, a3 = _four(P, to)
    for j in range(m):
        a = _wide(x[at + j]) + ratio * e[at + j]
        q[k0 + j] += a0 * a
        q[k1 + j] += a1 * a
        q[k2 + j] += a2 * a
        q[k3 + j] += a3 * a


@compiled
def _add_four_rows(
    x: Array, e: Array, ratio: Any, at: Any, P: Array, to: Any, r: Any, q: Array, k0: Any, m: Any
) -> None:
    s = _pitch(m)
    k1, k2, k3 = k0 + s, k0 + U(2) * s, k0 + U(3) * s
    bt, ct, dt = at + m, at + U(2) * m, at + U(3) * m
    a0, a1, a2, a3 = _four(P, to)
    b0, b1, b2, b3 = _four(P, to + r)
    c0, c1, c2, c3 = _four(P, to + U(2) * r)
    d0, d1, d2, d3 = _four(P, to + U(3) * r)
    for j in range(m):
        a = _wide(x[at + j]) + ratio * e[at + j]
        b = _wide(x[bt + j]) + ratio * e[bt + j]
        c = _wide(x[ct + j]) + ratio * e[ct + j]
        d = _wide(x[dt + j]) + ratio * e[dt + j]
        q[k0 + j] += a0 * a + b0 * b + (c0 * c + d0 * d)
        q[k1 + j] += a1 * a + b1 * b + (c1 * c + d1 * d)
        q[k2 + j] += a2 * a + b2 * b + (c2 * c + d2 * d)
        q[k3 + j] += a3 * a + b3 * b + (c3 * c + d3 * d)


@inlined
def _subtract_product(x: Array, e: Array, ratio: Any, P: Array, q: Array, columns: Any) -> None:
    n, m, r = _shape(x, q, columns)
    shared = _shared(q, m)
    for i in range(U(0), n, U(4)):
        end = min(i + U(4), n)
        if shared and end == i + U(4):
            _subtract_four_rows(x, e, ratio, i * m, P, i * r, r, q, m)
        else:
            for h in range(i, end):
                _subtract_row(x, e, ratio, h * m, P, h * r, q, m)
        for h in range(i, end if r > U(4) else i):
            for k in range(U(4), r, U(4)):
                _add_to_row(e, h * m, P, h * r + k, q, k * _pitch(m), m, e.dtype.type(-1))


@inlined
def _subtract_row(x: Array, e: Array, ratio: Any, at: Any, P: Array, to: Any, q: Array, m: Any) -> None:
    s = _pitch(m)
    k1, k2, k3 = s, U(2) * s, U(3) * s
    a0, a1, a2, a3 = _four(P, to)
    for j in range(m):
        sent = a0 * q[j] + a1 * q[k1 + j] + (a2 * q[k2 + j] + a3 * q[k3 + j])
        e[at + j] = _wide(x[at + j]) + ratio * e[at + j] - sent


@compiled
def _subtract_four_rows(x: Array, e: Array, ratio: Any, at: Any, P: Array, to: Any, r: Any, q: Array, m: Any) -> None:
    s = _pitch(m)
    k1, k2, k3, bt, ct, dt = s, U(2) * s, U(3) * s, at + m, at + U(2) * m, at + U(3) * m
    a0, a1, a2, a3 = _four(P, to)
    b0, b1, b2, b3 = _four(P, to + r)
    c0, c1, c2, c3 = _four(P, to + U(2) * r)
    d0, d1, d2, d3 = _four(P, to + U(3) * r)
    for j in range(m):
        q0, q1, q2, q3 = q[j], q[k1 + j], q[k2 + j], q[k3 + j]
        e[at + j] = _wide(x[at + j]) + ratio * e[at + j] - (a0 * q0 + a1 * q1 + (a2 * q2 + a3 * q3))
        e[bt + j] = _wide(x[bt + j]) + ratio * e[bt + j] - (b0 * q0 + b1 * q1 + (b2 * q2 + b3 * q3))
        e[ct + j] = _wide(x[ct + j]) + ratio * e[ct + j] - (c0 * q0 + c1 * q1 + (c2 * q2 + c3 * q3))
        e[dt + j] = _wide(x[dt + j]) + ratio * e[dt + j] - (d0 * q0 + d1 * q1 + (d2 * q2 + d3 * q3))


@inlined
def _settle_product(x: Array, e: Array, ratio: Any, P: Array, q: Array, M: Array, k: Array, columns: Any) -> None:
    n, m, r = _shape(x, q, columns)
    shared = _shared(q, m)
    for i in range(U(0), n, U(4)):
        end = min(i + U(4), n)
        if shared and end == i + U(4):
            _settle_four_rows(x, e, ratio, i * m, P, M, i * r, r, q, k, m)
        else:
            for h in range(i, end):
                _fetch(x, e, (h + U(1)) * m, m)
                _settle_row(x, e, ratio, h * m, P, M, h * r, q, k, m)
        for h in range(i, end if r > U(4) else i):
            for c in range(U(4), r, U(4)):
                _add_to_row(e, h * m, P, h * r + c, q, c * _pitch(m), m, e.dtype.type(-1))
                _add_to_row(x, h * m, M, h * r + c, k, c * _pitch(m), m, x.dtype.type(1))


@compiled
def _settle_row(
    x: Array, e: Array, ratio: Any, at: Any, P: Array, M: Array, to: Any, q: Array, k: Array, m: Any
) -> None:
    s = _pitch(m)
    k1, k2, k3 = s, U(2) * s, U(3) * s
    a0, a1, a2, a3 = _four(P, to)
    b0, b1, b2, b3 = _four(M, to)
    for j in range(m):
        sent = a0 * q[j] + a1 * q[k1 + j] + (a2 * q[k2 + j] + a3 * q[k3 + j])
        e[at + j] = x[at + j] + ratio * e[at + j] - sent
        x[at + j] = b0 * k[j] + b1 * k[k1 + j] + (b2 * k[k2 + j] + b3 * k[k3 + j])


@compiled
def _settle_four_rows(
    x: Array, e: Array, ratio: Any, at: Any, P: Array, M: Array, to: Any, r: Any, q: Array, k: Array, m: Any
) -> None:
    _subtract_four_rows(x, e, ratio, at, P, to, r, q, m)
    for h in range(U(4)):
        _write_row(x, at + h * m, M, to + h * r, k, m)


@inlined
def _write_product(P: Array, q: Array, out: Array, columns: Any) -> None:
    n, m, r = _shape(out, q, columns)
    for i in range(n):
        _write_row(out, i * m, P, i * r, q, m)
        for k in range(U(4), r, U(4)):
            _add_to_row(out, i * m, P, i * r + k, q, k * _pitch(m), m, out.dtype.type(1))


@inlined
def _write_row(out: Array, at: Any, P: Array, to: Any, q: Array, m: Any) -> None:
    s = _pitch(m)
    k1, k2, k3 = s, U(2) * s, U(3) * s
    a0, a1, a2, a3 = _four(P, to)
    for j in range(m):
        out[at + j] = a0 * q[j] + a1 * q[k1 + j] + (a2 * q[k2 + j] + a3 * q[k3 + j])


@compiled
def _add_to_row(out: Array, at: Any, P: Array, to: Any, q: Array, k0: Any, m: Any, alpha: Any) -> None:
    s = _pitch(m)
    k1, k2, k3 = k0 + s, k0 + U(2) * s, k0 + U(3) * s
    a0, a1, a2, a3 = _four(P, to)
    for j in range(m):
        out[at + j] += alpha * (a0 * q[k0 + j] + a1 * q[k1 + j] + (a2 * q[k2 + j] + a3 * q[k3 + j]))


@compiled
def _no_rows(m: Any, r: Any, like: Array) -> Array:
    """Zeros, for the columns of a factor of m x r and those that fill up the rank; they start at a line."""
    count, spare = (r + 3) // 4 * 4 * int(_pitch(U(m))), LINE // like.itemsize
    memory = np.zeros(count + spare, like.dtype)
    start = -(memory.ctypes.data // like.itemsize) % spare
    return memory[start : start + count]


@compiled
def _rows(Q: Array, r: Any) -> Array:
    """The columns of Q end to end, and as many of zeros as fill up the rank."""
    m = len(Q) // r
    rows, pitch = _no_rows(m, r, Q), _pitch(U(m))
    for j in range(m):
        for k in range(r):
            rows[U(k) * pitch + U(j)] = Q[j * r + k]
    return rows


@compiled
def _filled(P: Array, r: Any) -> Array:
    """P with as many columns of zeros as fill up the rank."""
    if r % 4 == 0:
        return P
    n, filled = len(P) // r, (r + 3) // 4 * 4
    found = np.zeros(n * filled, P.dtype)
    for i in range(n):
        for k in range(r):
            found[i * filled + k] = P[i * r + k]
    return found


@compiled
def product_each(places: Array, ratios: Array, like: Array, wide: Array) -> None:
    for i in range(len(places)):
        at, ratio = places[i], wide.dtype.type(ratios[i, 0])
        n, m, r = at[4], at[5], at[6]
        x, e, P = numbers(at[0], n * m, like), numbers(at[1], n * m, wide), numbers(at[2], n * r, wide)
        filled = _filled(P, r)
        _product(x, e, ratio, _rows(numbers(at[3], m * r, wide), r), filled, m)
        for j in range(n if r % 4 else 0):
            for k in range(r):
                P[j * r + k] = filled[j * (len(filled) // n) + k]


@compiled
def transposed_product_each(places: Array, ratios: Array, like: Array, wide: Array) -> None:
    for i in range(len(places)):
        at, ratio = places[i], wide.dtype.type(ratios[i, 0])
        n, m, r = at[4], at[5], at[6]
        x, e, P = numbers(at[0], n * m, like), numbers(at[1], n * m, wide), numbers(at[2], n * r, wide)
        Q, rows, pitch = numbers(at[3], m * r, wide), _no_rows(m, r, wide), _pitch(U(m))
        _transposed_product(x, e, ratio, _filled(P, r), rows, m)
        for j in range(m):
            for k in range(r):
                Q[j * r + k] = rows[U(k) * pitch + U(j)]


@compiled
def subtract_product_each(places: Array, ratios: Array, like: Array, wide: Array) -> None:
    for i in range(len(places)):
        at, ratio = places[i], wide.dtype.type(ratios[i, 0])
        n, m, r = at[4], at[5], at[6]
        x, e = numbers(at[0], n * m, like), numbers(at[1], n * m, wide)
        P, rows = numbers(at[2], n * r, wide), _rows(numbers(at[3], m * r, wide), r)
        _subtract_product(x, e, ratio, _filled(P, r), rows, m)


@compiled
def settle_product_each(places: Array, ratios: Array, wide: Array) -> None:
    for i in range(len(places)):
        at, ratio = places[i], wide.dtype.type(ratios[i, 0])
        n, m, r = at[4], at[5], at[6]
        x, e = numbers(at[0], n * m, wide), numbers(at[1], n * m, wide)
        P, q = _filled(numbers(at[2], n * r, wide), r), _rows(numbers(at[3], m * r, wide), r)
        mean, k = _filled(numbers(at[7], n * r, wide), r), _rows(numbers(at[8], m * r, wide), r)
        _settle_product(x, e, ratio, P, q, mean, k, m)


@compiled
def write_product_each(places: Array, wide: Array) -> None:
    for i in range(len(places)):
        at = places[i]
        n, m, r = at[3], at[4], at[5]
        P, rows = numbers(at[1], n * r, wide), _rows(numbers(at[2], m * r, wide), r)
        _write_product(_filled(P, r), rows, numbers(at[0], n * m, wide), m)
