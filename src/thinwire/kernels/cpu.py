"""The kernels on the CPU: numba loops over rows, in place on the tensors' own memory.

They release the GIL, since the engine's threads run them side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

Array = np.ndarray[Any, Any]
compiled = njit(nogil=True, cache=True, fastmath=False)
RUN = 256
"""Numbers that are added up in their own type before a wider one takes their sum."""
SIGNS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 1, -1).astype(np.float32)
"""What the bits of a byte stand for."""


def encode_signs(x: Tensor, rows: int, columns: int, block: int) -> tuple[Tensor, Tensor]:
    assert len(x) <= rows * columns
    scale = x.new_empty(rows, -(-columns // block))
    bits = x.new_empty(rows, -(-columns // 8), dtype=torch.uint8)
    _encode_signs(_array(x), columns, block, _array(scale), _array(bits))
    return scale, bits


def decode_signs(scale: Tensor, bits: Tensor, columns: int, block: int, out: Tensor) -> None:
    _check(scale, bits, columns, block, out)
    _decode_signs(_array(scale), _array(bits), columns, block, _array(out))


def add_signs(scale: Tensor, bits: Tensor, columns: int, block: int, base: Tensor, alpha: float, out: Tensor) -> None:
    _check(scale, bits, columns, block, out, base)
    _add_signs(_array(scale * alpha), _array(bits), columns, block, _array(base), _array(out))


def top_k(x: Tensor, k: int) -> Tensor:
    assert 1 <= k <= len(x)
    places = torch.empty(k, dtype=torch.int64)
    wide = x.dtype == torch.float64
    _top_k(_array(x).view(np.int64 if wide else np.int32), 0x7FF << 52 if wide else 0xFF << 23, _array(places))
    return places


def _check(scale: Tensor, bits: Tensor, columns: int, block: int, *vectors: Tensor) -> None:
    """The loops do not look where they write."""
    rows = len(bits)
    assert vectors[0].is_contiguous()
    assert len({len(v) for v in vectors}) == 1
    assert len(vectors[0]) <= rows * columns
    assert (tuple(scale.shape), tuple(bits.shape)) == ((rows, -(-columns // block)), (rows, -(-columns // 8)))


def _array(x: Tensor) -> Array:
    return x.detach().contiguous().numpy()


@compiled
def _encode_signs(x: Array, columns: int, block: int, scale: Array, bits: Array) -> None:
    for r in range(scale.shape[0]):
        row = x[r * columns : (r + 1) * columns]
        bits[r, (len(row) + 7) // 8 :] = 0
        for b in range(scale.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            scale[r, b] = _magnitude(row[start:end]) / max(1, end - start)
            whole = end - (end - start) % 8
            for j in range(start, whole, 8):
                bits[r, j // 8] = _pack(row[j : j + 8], 8)
            if whole < end:
                bits[r, whole // 8] = _pack(row[whole:end], end - whole)


@compiled
def _decode_signs(scale: Array, bits: Array, columns: int, block: int, out: Array) -> None:
    for r in range(scale.shape[0]):
        row = out[r * columns : (r + 1) * columns]
        for b in range(scale.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            whole = end - (end - start) % 8
            for j in range(start, whole, 8):
                signs, into = SIGNS[bits[r, j // 8]], row[j : j + 8]
                for k in range(8):
                    into[k] = scale[r, b] * signs[k]
            for j in range(whole, end):
                row[j] = scale[r, b] * SIGNS[bits[r, j // 8], j - whole]


@compiled
def _add_signs(scale: Array, bits: Array, columns: int, block: int, base: Array, out: Array) -> None:
    for r in range(scale.shape[0]):
        source, row = base[r * columns : (r + 1) * columns], out[r * columns : (r + 1) * columns]
        for b in range(scale.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            whole = end - (end - start) % 8
            for j in range(start, whole, 8):
                signs, onto, into = SIGNS[bits[r, j // 8]], source[j : j + 8], row[j : j + 8]
                for k in range(8):
                    into[k] = onto[k] + scale[r, b] * signs[k]
            for j in range(whole, end):
                row[j] = source[j] + scale[r, b] * SIGNS[bits[r, j // 8], j - whole]


@njit(nogil=True, cache=True, fastmath={"reassoc"})  # any order of additions, so that they can be done side by side
def _magnitude(x: Array) -> float:
    total = 0.0
    for start in range(0, len(x), RUN):
        part = x.dtype.type(0)
        for j in range(start, min(len(x), start + RUN)):
            part += abs(x[j])
        total += part
    return total


@compiled
def _top_k(bits: Array, infinite: int, places: Array) -> None:
    """A radix select: magnitudes are ordered as their bits are, the sign's aside."""
    unsigned, least, left = np.iinfo(bits.dtype).max, 0, len(places)
    counts = np.empty(1 << 16, np.int64)
    for shift in range(bits.itemsize * 8 - 16, -1, -16):
        # 16 bits more of the k-th magnitude; of those that share them, ``left`` are to be taken
        counts[:] = 0
        for i in range(len(bits)):
            size = min(bits[i] & unsigned, infinite)  # NaN too is infinite
            if size >> shift >> 16 == least:
                counts[size >> shift & 0xFFFF] += 1
        digit = 0xFFFF
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        least = least << 16 | digit
    taken = 0
    for i in range(len(bits)):
        size = min(bits[i] & unsigned, infinite)
        if size > least or (size == least and left > 0):
            left -= size == least
            places[taken] = i
            taken += 1


@compiled
def _pack(x: Array, count: int) -> int:
    byte = 0
    for k in range(count):  # inlined: a count of 8 is unrolled into vector instructions
        byte |= (x[k] >= 0) << k
    return byte
