"""The kernels on the CPU: numba loops over rows, in place on the tensors' own memory.

They release the GIL, since the engine's threads run them side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from thinwire.kernels.reference import row_keys

Array = np.ndarray[Any, Any]
compiled = njit(nogil=True, cache=True, fastmath=False)
FLAGS = 2048
"""Signs that are noted before they are packed; they stay in the nearest cache."""
SIGNS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 1, -1).astype(np.float32)
"""What the bits of a byte stand for."""
GATHERING = np.uint64(0x0102040810204080)
"""Times eight bytes of 0 or 1, it has their bits in its highest byte."""


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


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    packed = codes.new_empty(len(codes), -(-codes.shape[1] * bits // 8))
    _pack_bits(_array(codes), bits, _array(packed))
    return packed


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    assert packed.shape[1] == -(-count * bits // 8)
    codes = packed.new_empty(len(packed), count)
    _unpack_bits(_array(packed), bits, _array(codes))
    return codes


def encode_levels(x: Tensor, rows: int, columns: int, block: int, bits: int, key: int) -> tuple[Tensor, Tensor]:
    assert len(x) <= rows * columns
    scale = x.new_empty(rows, -(-columns // block))
    codes = x.new_empty(rows, -(-columns * bits // 8), dtype=torch.uint8)
    s = _array(scale).dtype.type(2 ** (bits - 1) - 1)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    _encode_levels(_array(x), columns, block, bits, s, low, high, _array(scale), _array(codes))
    return scale, codes


def add_levels(
    scale: Tensor, codes: Tensor, columns: int, block: int, bits: int, base: Tensor, alpha: float, out: Tensor
) -> None:
    assert out.is_contiguous()
    assert len(out) == len(base) <= len(codes) * columns
    assert (scale.shape[1], codes.shape[1]) == (-(-columns // block), -(-columns * bits // 8))
    s = 2 ** (bits - 1) - 1
    levels = torch.arange(2**bits).sub(s).to(scale.dtype)
    unit = scale / s * alpha
    _add_levels(_array(unit), _array(codes), columns, block, bits, _array(levels), _array(base), _array(out))


def top_k(x: Tensor, k: int) -> Tensor:
    assert 1 <= k <= len(x)
    places = torch.empty(k, dtype=torch.int64)
    wide = x.dtype == torch.float64
    _top_k(_array(x).view(np.int64 if wide else np.int32), 0x7FF << 52 if wide else 0xFF << 23, _array(places))
    return places


def count_sketch(x: Tensor, rows: int, columns: int, key: int) -> Tensor:
    sketch = x.new_zeros(rows, columns)
    _count_sketch(_array(x), np.array(row_keys(rows, key), np.uint32), _array(sketch))
    return sketch


def estimate(sketch: Tensor, d: int, key: int) -> Tensor:
    assert len(sketch) % 2
    out = sketch.new_empty(d)
    _estimate(_array(sketch), np.array(row_keys(len(sketch), key), np.uint32), _array(out))
    return out


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
    flags = np.empty(FLAGS, np.uint8)
    for r in range(scale.shape[0]):
        row = x[r * columns : (r + 1) * columns]
        bits[r, (len(row) + 7) // 8 :] = 0
        for b in range(scale.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            scale[r, b] = _magnitude(row[start:end]) / max(1, end - start)
            for chunk in range(start, end, FLAGS):
                _pack(row[chunk : min(end, chunk + FLAGS)], flags, bits[r, chunk // 8 :])


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
    for j in range(len(x)):
        total += abs(x[j])
    return total


@compiled
def _pack_bits(codes: Array, bits: int, packed: Array) -> None:
    for r in range(codes.shape[0]):
        _pack_row(codes[r], bits, packed[r])


@compiled
def _pack_row(codes: Array, bits: int, packed: Array) -> None:
    whole = len(codes) // 8 * 8
    for j in range(0, whole, 8):
        _store(_word_of(codes, j, 8, bits), packed, j // 8 * bits, bits)
    if whole < len(codes):
        last = whole // 8 * bits
        _store(_word_of(codes, whole, len(codes) - whole, bits), packed, last, len(packed) - last)


@compiled
def _unpack_bits(packed: Array, bits: int, codes: Array) -> None:
    for r in range(codes.shape[0]):
        row, whole = codes[r], codes.shape[1] // 8 * 8
        for j in range(0, whole, 8):
            _codes_of(_load(packed[r], j // 8 * bits, bits), bits, row, j, 8)
        if whole < len(row):
            last = whole // 8 * bits
            _codes_of(_load(packed[r], last, packed.shape[1] - last), bits, row, whole, len(row) - whole)


@compiled
def _encode_levels(
    x: Array, columns: int, block: int, bits: int, s: Any, low: Any, high: Any, scale: Array, codes: Array
) -> None:
    buffer = np.empty(block, np.uint8)
    for r in range(scale.shape[0]):
        row = x[r * columns : (r + 1) * columns]
        for b in range(scale.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            size = min(block, columns - b * block)
            most = _largest(row, start, end)
            scale[r, b] = most
            real = end - start if 0 < most < np.inf else 0
            _round(row[start : start + real], most, s, r * columns + start, low, high, buffer)
            buffer[real:size] = np.uint8(s)
            _pack_row(buffer[:size], bits, codes[r, b * block // 8 * bits :])


@compiled
def _add_levels(
    unit: Array, codes: Array, columns: int, block: int, bits: int, levels: Array, base: Array, out: Array
) -> None:
    for r in range(unit.shape[0]):
        source, row = base[r * columns : (r + 1) * columns], out[r * columns : (r + 1) * columns]
        whole = len(row) // 8 * 8
        for j in range(0, whole, 8):
            word = _load(codes[r], j // 8 * bits, bits)
            _levels_onto(unit[r, j // block], word, bits, levels, source, row, j, 8)
        if whole < len(row):
            last = whole // 8 * bits
            word = _load(codes[r], last, min(bits, codes.shape[1] - last))
            _levels_onto(unit[r, whole // block], word, bits, levels, source, row, whole, len(row) - whole)


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
def _count_sketch(x: Array, salts: Array, sketch: Array) -> None:
    for j in range(len(x)):
        mixed = _mixed(np.uint32(j))
        for r in range(len(salts)):
            bits = _mixed(mixed ^ salts[r])
            sketch[r, _place(bits, sketch.shape[1])] += -x[j] if bits & np.uint32(1) else x[j]


@compiled
def _estimate(sketch: Array, salts: Array, out: Array) -> None:
    rows, columns = sketch.shape
    guesses = np.empty((rows, 512), sketch.dtype)
    for start in range(0, len(out), 512):
        size = min(512, len(out) - start)
        for r in range(rows):
            for k in range(size):
                bits = _mixed(_mixed(np.uint32(start + k)) ^ salts[r])
                guess = sketch[r, _place(bits, columns)]
                guesses[r, k] = -guess if bits & np.uint32(1) else guess
        # the rows sorted by exchanges of neighbours, many numbers at a time, as far as the middle one
        for last in range(rows - 1, rows // 2 - 1, -1):
            for r in range(last):
                _exchange(guesses[r], guesses[r + 1])
        out[start : start + size] = guesses[rows // 2, :size]


# Those below are inlined where they are called, so a count of 8 is unrolled into vector instructions.


@compiled
def _pack(x: Array, flags: Array, bits: Array) -> None:
    for k in range(len(x)):
        flags[k] = x[k] >= 0
    flags[len(x) :] = 0
    octets = flags.view(np.uint64)
    for q in range((len(x) + 7) // 8):
        bits[q] = (octets[q] * GATHERING) >> np.uint64(56)


@compiled
def _word_of(codes: Array, start: int, count: int, bits: int) -> Any:
    word = np.uint64(0)
    for k in range(count):
        word |= np.uint64(codes[start + k]) << np.uint64(k * bits)
    return word


@compiled
def _codes_of(word: Any, bits: int, codes: Array, start: int, count: int) -> None:
    mask = np.uint64((1 << bits) - 1)
    for k in range(count):
        codes[start + k] = word & mask
        word >>= np.uint64(bits)


@compiled
def _round(x: Array, most: Any, s: Any, place: int, low: Any, high: Any, codes: Array) -> None:
    for k in range(len(x)):
        a = abs(x[k]) / most * s
        level = np.floor(a)
        level += _uniform(np.uint32(place + k), low, high) < a - level
        codes[k] = np.uint8(np.int32(s + (-level if x[k] < 0 else level)))


@compiled
def _levels_onto(
    unit: Any, word: Any, bits: int, levels: Array, base: Array, out: Array, start: int, count: int
) -> None:
    mask = np.uint64((1 << bits) - 1)
    for k in range(count):
        out[start + k] = base[start + k] + unit * levels[word & mask]
        word >>= np.uint64(bits)


@compiled
def _store(word: Any, out: Array, start: int, count: int) -> None:
    for b in range(count):
        out[start + b] = word >> np.uint64(8 * b) & np.uint64(255)


@compiled
def _load(packed: Array, start: int, count: int) -> Any:
    word = np.uint64(0)
    for b in range(count):
        word |= np.uint64(packed[start + b]) << np.uint64(8 * b)
    return word


@compiled
def _largest(x: Array, start: int, end: int) -> Any:
    """The largest magnitude, NaN if there is one."""
    most, bad = x.dtype.type(0), 0
    for j in range(start, end):
        a = abs(x[j])
        most = a if a > most else most
        bad |= a != a
    return most + x.dtype.type(np.nan) if bad else most


@compiled
def _uniform(j: Any, low: Any, high: Any) -> Any:
    bits = _mixed(_mixed(_mixed(j) ^ low) ^ high)
    return np.float32(bits >> np.uint32(8)) * np.float32(2.0**-24)


@compiled
def _exchange(low: Array, high: Array) -> None:
    for k in range(len(low)):
        a, b = low[k], high[k]
        low[k] = b if b < a else a
        high[k] = a if b < a else b


@compiled
def _place(bits: Any, columns: int) -> Any:
    return np.int64(bits >> np.uint32(1)) * columns >> 31


@compiled
def _mixed(x: Any) -> Any:
    x = np.uint32((x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B))
    return np.uint32(x ^ x >> np.uint32(16))
