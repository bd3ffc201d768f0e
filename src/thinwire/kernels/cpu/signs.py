"""Signs and their scales; see ``reference``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.value import Sum, settled
from thinwire.kernels.cpu.source import CHUNK, Array, add_in, compiled, peek, read
from thinwire.kernels.cpu.table import LIKE, Table, matrix, numbers
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
OCTETS = LIKE[torch.uint8]


def encode_signs(x: Tensor | Sum, rows: int, columns: int, block: int, most: float) -> tuple[Tensor, Tensor]:
    return encode_signs_each([(x, rows, columns, block, most)])[0]


def encode_signs_each(batch: Sequence[tuple[Tensor | Sum, int, int, int, float]]) -> list[tuple[Tensor, Tensor]]:
    table, found = Table(), []
    for x, rows, columns, block, most in batch:
        assert x.numel() <= rows * columns
        pending = isinstance(x, Sum) and x.pending
        plain, error, ratio = (x.x, x.error, x.ratio) if pending else (settled(x), None, 1.0)  # type: ignore[union-attr]
        wide = error.dtype if error is not None else torch.promote_types(plain.dtype, torch.float32)
        scale = torch.empty(rows, -(-columns // block), dtype=wide)
        bits = torch.empty(rows, -(-columns // 8), dtype=torch.uint8)
        found.append((scale, bits))
        sizes = plain.numel(), rows, columns, block
        at = table.at(plain), table.at(error), *sizes, table.at(scale), table.at(bits)
        table.add((plain.dtype, error is not None, wide), at, (ratio, most))
    for (narrow, summed, wide), places, factors in table:
        _encode_each(places, factors, LIKE[narrow], LIKE[wide] if summed else None, LIKE[wide], OCTETS)
    return found


def decode_signs(scale: Tensor, bits: Tensor, columns: int, block: int, out: Tensor) -> None:
    decode_signs_each([(scale, bits, columns, block, out)])


def decode_signs_each(batch: Sequence[tuple[Tensor, Tensor, int, int, Tensor]]) -> None:
    table = Table()
    for scale, bits, columns, block, out in batch:
        check(scale, bits, columns, block, bits.shape[0] * columns, out)
        signs = bits.shape[0], columns, block, *table.rows(scale), *table.rows(bits)
        table.add(out.dtype, (*signs, out.data_ptr(), out.numel()))
    for dtype, places, _ in table:
        _decode_each(places, LIKE[dtype], OCTETS)


Addition = tuple[Tensor, Tensor, int, int, Tensor | Sum, float, Tensor, bool]


def add_signs(
    scale: Tensor, bits: Tensor, columns: int, block: int, base: Tensor | Sum, alpha: float, out: Tensor, stacked: bool
) -> None:
    add_signs_each([(scale, bits, columns, block, base, alpha, out, stacked)])


def add_signs_each(batch: Sequence[Addition]) -> None:
    table, sums = Table(), Table()
    for scale, bits, columns, block, base, alpha, out, stacked in batch:
        check(scale, bits, columns, block, columns if stacked else bits.shape[0] * columns, out)
        signs = bits.shape[0], columns, block, *table.rows(scale), *table.rows(bits), out.data_ptr(), out.numel()
        if isinstance(base, Sum):
            assert base.pending
            assert base.error.data_ptr() == out.data_ptr()
            assert base.numel() == out.numel()
            assert not stacked
            sums.add((base.x.dtype, out.dtype), (*signs, sums.at(base.x)), (alpha, base.ratio))
            continue
        assert base.numel() == out.numel()
        stream = out.nbytes > LARGE and out.data_ptr() != base.data_ptr() and out.data_ptr() % LINE == 0
        table.add(out.dtype, (*signs, table.at(base), stacked, stream), (alpha,))
    for dtype, places, factors in table:
        _add_each(places, factors, LIKE[dtype], OCTETS)
    for (narrow, wide), places, factors in sums:
        _add_to_each_sum(places, factors, LIKE[narrow], LIKE[wide], OCTETS)


def check(scale: Tensor, bits: Tensor, columns: int, block: int, most: int, out: Tensor) -> None:
    rows, octets = bits.shape
    assert out.is_contiguous()
    assert out.numel() <= most
    assert scale.dtype == out.dtype
    assert octets == -(-columns // 8)
    assert scale.shape == (rows, -(-columns // block))


@compiled
def _encode_each(places: Array, factors: Array, like: Array, summed: Array | None, wide: Array, octets: Array) -> None:
    scratch = np.empty(STRIDE, wide.dtype)
    for i in range(len(places)):
        at = places[i]
        n, rows, columns, block = at[2], at[3], at[4], at[5]
        x, error, ratio = numbers(at[0], n, like), numbers(at[1], n, summed), wide.dtype.type(factors[i, 0])
        scale, bits = matrix(at[6], rows, -(-columns // block), wide), matrix(at[7], rows, -(-columns // 8), octets)
        _encode(x, error, ratio, scratch, columns, block, factors[i, 1], scale, bits)


@compiled
def signs_at(at: Array, wide: Array, octets: Array) -> Any:
    """Columns, block, scale, bits, and the numbers that they are for; rows may lie farther apart than they are long."""
    return (
        at[1],
        at[2],
        matrix(at[3], at[0], at[4], wide),
        matrix(at[5], at[0], at[6], octets),
        numbers(at[7], at[8], wide),
    )


@compiled
def _decode_each(places: Array, wide: Array, octets: Array) -> None:
    for i in range(len(places)):
        columns, block, scale, bits, out = signs_at(places[i], wide, octets)
        _decode(scale, bits, columns, block, out)


@compiled
def _add_each(places: Array, factors: Array, wide: Array, octets: Array) -> None:
    for i in range(len(places)):
        columns, block, scale, bits, out = signs_at(places[i], wide, octets)
        base, stacked, stream = numbers(places[i, 9], len(out), wide), places[i, 10] != 0, places[i, 11] != 0
        _add(scale, wide.dtype.type(factors[i, 0]), bits, columns, block, stacked, stream, base, out)


@compiled
def _add_to_each_sum(places: Array, factors: Array, like: Array, wide: Array, octets: Array) -> None:
    scratch = np.empty(CHUNK, wide.dtype)
    for i in range(len(places)):
        columns, block, scale, bits, error = signs_at(places[i], wide, octets)
        alpha, ratio, x = (
            wide.dtype.type(factors[i, 0]),
            wide.dtype.type(factors[i, 1]),
            numbers(places[i, 9], len(error), like),
        )
        _add_to_sum(scale, alpha, bits, columns, block, x, error, ratio, scratch)


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
            scale[r, b] = encode_block(x, error, ratio, scratch, start, end, octets[(start - first) // 8 :], most)


@compiled
def encode_block(
    x: Array, error: Array | None, ratio: Any, scratch: Array, start: int, end: int, octets: Array, most: float
) -> Any:
    """The bits of numbers ``start`` to ``end`` go to ``octets``; their scale."""
    total, squares, whole = 0.0, 0.0, end - (end - start) % STRIDE
    for j in range(start, whole, STRIDE):
        noted = note_signs(x, error, ratio, scratch, j, octets, (j - start) // 8)
        total, squares = total + noted[0], squares + noted[1]
    rest = peek(x, error, ratio, scratch, whole, end)
    for j in range(len(rest)):
        size = np.float64(abs(rest[j]))
        total, squares = total + size, squares + size * size
    _note(rest, octets[(whole - start) // 8 :])
    mean = total / max(1, end - start)
    spread = squares / (total * mean) if total * mean > 0 else 1.0
    return mean * min(most, max(1.0, spread))


@compiled
def _decode(scale: Array, bits: Array, columns: int, block: int, out: Array) -> None:
    for r in range(scale.shape[0]):
        row = out[r * columns : (r + 1) * columns]
        for b in range(-(-columns // block)):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            put_part(scale[r, b], bits[r, start // 8 :], row[start:end])


@compiled
def put_part(size: Any, octets: Array, part: Array) -> None:
    whole = len(part) // LANES * LANES
    for j in range(0, whole, LANES):
        put_signed(part, j, word_at(octets, j // 8), size)
    for j in range(whole, len(part)):
        part[j] = size if octets[j // 8] >> (j % 8) & 1 else -size


@compiled
def _add(
    scale: Array,
    alpha: Any,
    bits: Array,
    columns: int,
    block: int,
    stacked: bool,
    stream: bool,
    base: Array,
    out: Array,
) -> None:
    layers = scale.shape[0] if stacked else 1
    for r in range(scale.shape[0] // layers):
        source, row = base[r * columns : (r + 1) * columns], out[r * columns : (r + 1) * columns]
        for b in range(-(-columns // block)):
            start, end = min(len(row), b * block), min(len(row), (b + 1) * block)
            for j in range(start, end, CHUNK):
                onto, into = source[j : min(end, j + CHUNK)], row[j : min(end, j + CHUNK)]
                past = stream and layers == 1 and (r * columns + j) * out.itemsize % LINE == 0
                for i in range(r, r + layers):
                    add_part(alpha * scale[i, b], bits[i, j // 8 :], past, onto, into)
                    onto = into
    if stream:
        fence()


@compiled
def _add_to_sum(
    scale: Array, alpha: Any, bits: Array, columns: int, block: int, x: Array, error: Array, ratio: Any, scratch: Array
) -> None:
    for r in range(scale.shape[0]):
        first, last = min(len(x), r * columns), min(len(x), (r + 1) * columns)
        for b in range(-(-columns // block)):
            end = min(last, first + (b + 1) * block)
            for j in range(min(last, first + b * block), end, CHUNK):
                part = error[j : min(end, j + CHUNK)]
                add_in(read(x, None, ratio, scratch, j, j + len(part)), part, ratio)
                add_part(alpha * scale[r, b], bits[r, (j - first) // 8 :], False, part, part)


@compiled
def add_part(size: Any, octets: Array, past: bool, onto: Array, into: Array) -> None:
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
