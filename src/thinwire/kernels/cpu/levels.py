"""Levels between plus and minus a block's norm, by chance; see ``reference``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.value import Sum
from thinwire.kernels.cpu.bits import pack, unpack
from thinwire.kernels.cpu.hashing import mixed
from thinwire.kernels.cpu.source import CHUNK, Array, array, compiled, read, source


def encode_levels(
    x: Tensor | Sum, rows: int, columns: int, block: int, bits: int, norm: float, key: int
) -> tuple[Tensor, Tensor]:
    assert x.numel() <= rows * columns
    given = source(x, block)
    wide = given[3].itemsize == 8
    scale = torch.empty(rows, -(-columns // block), dtype=torch.float64 if wide else torch.float32)
    codes = torch.empty(rows, -(-columns * bits // 8), dtype=torch.uint8)
    s = given[3].dtype.type(2 ** (bits - 1) - 1)
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    largest = array(scale).view(np.int64 if wide else np.int32)
    _encode(*given, columns, block, bits, norm == 2, s, low, high, array(scale), largest, array(codes))
    return scale, codes


def add_levels(
    scale: Tensor,
    codes: Tensor,
    columns: int,
    block: int,
    bits: int,
    base: Tensor,
    alpha: float,
    out: Tensor,
    stacked: bool,
) -> None:
    assert out.is_contiguous()
    assert len(out) == len(base) <= (columns if stacked else len(codes) * columns)
    assert (scale.shape[1], codes.shape[1]) == (-(-columns // block), -(-columns * bits // 8))
    s = 2 ** (bits - 1) - 1
    unit = array(scale / s * alpha)
    _add(unit, array(codes), columns, block, bits, unit.dtype.type(s), stacked, array(base), array(out))


@compiled
def _encode(
    x: Array,
    error: Array | None,
    ratio: Any,
    p: Array,
    columns: int,
    block: int,
    bits: int,
    two: bool,
    s: Any,
    low: Any,
    high: Any,
    scale: Array,
    largest: Array,
    codes: Array,
) -> None:
    buffer = np.empty(block, np.uint8)
    for r in range(scale.shape[0]):
        first, last = min(len(x), r * columns), min(len(x), (r + 1) * columns)
        for b in range(scale.shape[1]):
            start, end = min(last, first + b * block), min(last, first + (b + 1) * block)
            size = min(block, columns - b * block)
            numbers = read(x, error, ratio, p, start, end)
            if two:
                scale[r, b] = _two_norm(numbers)
            else:
                largest[r, b] = _largest(numbers.view(largest.dtype))
            most = scale[r, b]
            real = len(numbers) if 0 < most < np.inf else 0
            _round(numbers[:real], most, s, start, low, high, buffer)
            buffer[real:size] = np.uint8(s)
            pack(buffer[:size], bits, codes[r, b * block // 8 * bits :])


@compiled
def _add(
    unit: Array, codes: Array, columns: int, block: int, bits: int, s: Any, stacked: bool, base: Array, out: Array
) -> None:
    levels = np.empty(CHUNK, np.uint8)
    layers = unit.shape[0] if stacked else 1
    for r in range(unit.shape[0] // layers):
        source, row = base[r * columns : (r + 1) * columns], out[r * columns : (r + 1) * columns]
        for b in range(unit.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            for j in range(start, end, CHUNK):
                onto, into = source[j : min(end, j + CHUNK)], row[j : min(end, j + CHUNK)]
                for i in range(r, r + layers):
                    unpack(codes[i, j // 8 * bits :], bits, levels[: len(into)])
                    _add_part(unit[i, b], levels, s, onto, into)
                    onto = into


@compiled
def _add_part(unit: Any, levels: Array, s: Any, onto: Array, into: Array) -> None:
    for k in range(len(into)):
        into[k] = onto[k] + unit * (type(s)(levels[k]) - s)


@compiled
def _largest(bits: Array) -> Any:
    """The largest magnitude's bits: magnitudes are ordered as their bits are, with NaN above all."""
    most, unsigned = bits.dtype.type(0), np.iinfo(bits.dtype).max
    for k in range(len(bits)):
        most = max(most, bits.dtype.type(bits[k] & unsigned))
    return most


@compiled
def _two_norm(x: Array) -> Any:
    total = 0.0
    for k in range(len(x)):
        total += np.float64(x[k]) * np.float64(x[k])
    return np.sqrt(total)


@compiled
def _round(x: Array, most: Any, s: Any, place: int, low: Any, high: Any, codes: Array) -> None:
    zero = np.int32(s)
    for k in range(len(x)):
        a = abs(x[k]) / most * s
        level = np.int32(a)
        up = _uniform(np.uint32(place + k), low, high) < a - x.dtype.type(level)
        level = np.int32(min(level + up, zero))
        codes[k] = np.uint8(zero - level if x[k] < 0 else zero + level)


@compiled
def _uniform(j: Any, low: Any, high: Any) -> Any:
    bits = mixed(mixed(mixed(j) ^ low) ^ high)
    return np.float32(bits >> np.uint32(8)) * np.float32(2.0**-24)
