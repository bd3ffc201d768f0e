"""Signs and their scales; see ``reference``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.value import Sum
from thinwire.kernels.cpu.source import CHUNK, Array, add_in, array, compiled, glance, peek, read
from thinwire.kernels.cpu.vector import (
    LANES,
    LINE,
    STRIDE,
    add_signed,
    fence,
    note_signs,
    put_signed,
    stream_signed,
    word_at,
)

LARGE = 1 << 23
"""Bytes of what will have left the caches before it is read again."""


def encode_signs(x: Tensor | Sum, rows: int, columns: int, block: int, most: float) -> tuple[Tensor, Tensor]:
    assert x.numel() <= rows * columns
    given = glance(x, STRIDE)
    scale = torch.empty(rows, -(-columns // block), dtype=torch.float64 if given[3].itemsize == 8 else torch.float32)
    bits = torch.empty(rows, -(-columns // 8), dtype=torch.uint8)
    _encode(*given, columns, block, most, array(scale), array(bits))
    return scale, bits


def decode_signs(scale: Tensor, bits: Tensor, columns: int, block: int, out: Tensor) -> None:
    _check(scale, bits, columns, block, len(bits) * columns, out)
    _decode(array(scale), array(bits), columns, block, array(out))


def add_signs(
    scale: Tensor, bits: Tensor, columns: int, block: int, base: Tensor | Sum, alpha: float, out: Tensor, stacked: bool
) -> None:
    if isinstance(base, Sum):
        assert base.error.data_ptr() == out.data_ptr()
        assert not stacked
        _check(scale, bits, columns, block, len(bits) * columns, out, base.error)
        given = glance(base, CHUNK)
        _add_to_sum(array(scale * alpha), array(bits), columns, block, given[0], array(out), *given[2:])
        return
    _check(scale, bits, columns, block, columns if stacked else len(bits) * columns, out, base)
    stream = out.nbytes > LARGE and out.data_ptr() != base.data_ptr() and out.data_ptr() % LINE == 0
    _add(array(scale * alpha), array(bits), columns, block, stacked, stream, array(base), array(out))


def _check(scale: Tensor, bits: Tensor, columns: int, block: int, most: int, *vectors: Tensor) -> None:
    rows = len(bits)
    assert vectors[0].is_contiguous()
    assert len({len(v) for v in vectors}) == 1
    assert len(vectors[0]) <= most
    assert (tuple(scale.shape), tuple(bits.shape)) == ((rows, -(-columns // block)), (rows, -(-columns // 8)))


@compiled
def _encode(
    x: Array,
    error: Array | None,
    ratio: Any,
    scratch: Array,
    columns: int,
    block: int,
    most: float,
    scale: Array,
    bits: Array,
) -> None:
    for r in range(scale.shape[0]):
        first, last = min(len(x), r * columns), min(len(x), (r + 1) * columns)
        octets = bits[r]
        octets[(last - first + 7) // 8 :] = 0
        for b in range(scale.shape[1]):
            start, end = min(last, first + b * block), min(last, first + (b + 1) * block)
            total, squares, whole = 0.0, 0.0, end - (end - start) % STRIDE
            for j in range(start, whole, STRIDE):
                noted = note_signs(x, error, ratio, scratch, j, octets, (j - first) // 8)
                total, squares = total + noted[0], squares + noted[1]
            rest = peek(x, error, ratio, scratch, whole, end)
            for j in range(len(rest)):
                size = np.float64(abs(rest[j]))
                total, squares = total + size, squares + size * size
            _note(rest, octets[(whole - first) // 8 :])
            mean = total / max(1, end - start)
            spread = squares / (total * mean) if total * mean > 0 else 1.0
            scale[r, b] = mean * min(most, max(1.0, spread))


@compiled
def _decode(scale: Array, bits: Array, columns: int, block: int, out: Array) -> None:
    for r in range(scale.shape[0]):
        row = out[r * columns : (r + 1) * columns]
        for b in range(scale.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            part, octets, size = row[start:end], bits[r, start // 8 :], scale[r, b]
            whole = len(part) // LANES * LANES
            for j in range(0, whole, LANES):
                put_signed(part, j, word_at(octets, j // 8), size)
            for j in range(whole, len(part)):
                part[j] = size if octets[j // 8] >> (j % 8) & 1 else -size


@compiled
def _add(
    scale: Array, bits: Array, columns: int, block: int, stacked: bool, stream: bool, base: Array, out: Array
) -> None:
    layers = scale.shape[0] if stacked else 1
    for r in range(scale.shape[0] // layers):
        source, row = base[r * columns : (r + 1) * columns], out[r * columns : (r + 1) * columns]
        for b in range(scale.shape[1]):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            for j in range(start, end, CHUNK):
                onto, into = source[j : min(end, j + CHUNK)], row[j : min(end, j + CHUNK)]
                past = stream and layers == 1 and (r * columns + j) * out.itemsize % LINE == 0
                for i in range(r, r + layers):
                    _add_part(scale[i, b], bits[i, j // 8 :], past, onto, into)
                    onto = into
    if stream:
        fence()


@compiled
def _add_to_sum(
    scale: Array, bits: Array, columns: int, block: int, x: Array, error: Array, ratio: Any, scratch: Array
) -> None:
    for r in range(scale.shape[0]):
        first, last = min(len(x), r * columns), min(len(x), (r + 1) * columns)
        for b in range(scale.shape[1]):
            end = min(last, first + (b + 1) * block)
            for j in range(min(last, first + b * block), end, CHUNK):
                part = error[j : min(end, j + CHUNK)]
                add_in(read(x, None, ratio, scratch, j, j + len(part)), part, ratio)
                _add_part(scale[r, b], bits[r, (j - first) // 8 :], False, part, part)


@compiled
def _add_part(size: Any, octets: Array, past: bool, onto: Array, into: Array) -> None:
    whole = len(into) // LANES * LANES
    if past:
        for j in range(0, whole, LANES):
            stream_signed(onto, into, j, word_at(octets, j // 8), size)
    else:
        for j in range(0, whole, LANES):
            add_signed(onto, into, j, word_at(octets, j // 8), size)
    for j in range(whole, len(into)):
        into[j] = onto[j] + (size if octets[j // 8] >> (j % 8) & 1 else -size)


@compiled
def _note(x: Array, octets: Array) -> None:
    for j in range(0, len(x), 8):
        octet = 0
        for k in range(min(8, len(x) - j)):
            octet |= (x[j + k] >= 0) << k
        octets[j // 8] = octet
