"""What is done with signs once they are there, by a worker and by a server: one pass each; see ``reference``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.signs import OCTETS, add_part, check, encode_block, put_part, signs_at
from thinwire.kernels.cpu.source import CHUNK, Array, add_in, compiled
from thinwire.kernels.cpu.table import LIKE, Table, numbers
from thinwire.kernels.cpu.vector import STRIDE


def settle_signs(
    scale: Tensor,
    bits: Tensor,
    mean_scale: Tensor,
    mean_bits: Tensor,
    columns: int,
    block: int,
    x: Tensor,
    error: Tensor,
    ratio: float,
) -> None:
    settle_signs_each([(scale, bits, mean_scale, mean_bits, columns, block, x, error, ratio)])


def settle_signs_each(
    batch: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, int, int, Tensor, Tensor, float]],
) -> None:
    table = Table()
    for scale, bits, mean_scale, mean_bits, columns, block, x, error, ratio in batch:
        rows = bits.shape[0]
        check(scale, bits, columns, block, rows * columns, error)
        assert x.shape == error.shape
        assert x.is_contiguous()
        assert (mean_scale.shape, mean_bits.shape) == (scale.shape, bits.shape)
        assert mean_scale.dtype == x.dtype == error.dtype
        sent = *table.rows(scale), *table.rows(bits), error.data_ptr(), error.numel()
        mean = *table.rows(mean_scale), *table.rows(mean_bits), x.data_ptr(), x.numel()
        table.add(x.dtype, (rows, columns, block, *sent, rows, columns, block, *mean), (ratio,))
    for dtype, places, factors in table:
        _settle_each(places, factors, LIKE[dtype], OCTETS)


def serve_signs(
    scale: Tensor, bits: Tensor, columns: int, block: int, error: Tensor, ratio: float, most: float
) -> tuple[Tensor, Tensor]:
    return serve_signs_each([(scale, bits, columns, block, error, ratio, most)])[0]


def serve_signs_each(
    batch: Sequence[tuple[Tensor, Tensor, int, int, Tensor, float, float]],
) -> list[tuple[Tensor, Tensor]]:
    table, found = Table(), []
    octets = [bits.shape[1] for _, bits, *_ in batch]
    all_bits = torch.split_with_sizes(torch.empty(sum(octets), dtype=torch.uint8), octets)
    for (scale, bits, columns, block, error, ratio, most), own_bits in zip(batch, all_bits, strict=True):
        own = scale.new_empty(scale.shape[1])
        found.append((own, own_bits))
        given = _given_at(table, scale, bits, columns, block, error)
        at = *given, own.data_ptr(), own_bits.data_ptr()
        table.add(error.dtype, at, (1 / scale.shape[0], ratio, most))
    for dtype, places, factors in table:
        _serve_each(places, factors, LIKE[dtype], OCTETS)
    return found


def settle_served_signs(
    scale: Tensor,
    bits: Tensor,
    answer_scale: Tensor,
    answer_bits: Tensor,
    columns: int,
    block: int,
    error: Tensor,
    ratio: float,
) -> None:
    settle_served_signs_each([(scale, bits, answer_scale, answer_bits, columns, block, error, ratio)])


def settle_served_signs_each(
    batch: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, int, int, Tensor, float]],
) -> None:
    table = Table()
    for scale, bits, answer_scale, answer_bits, columns, block, error, ratio in batch:
        assert answer_scale.shape == scale.shape[1:]
        assert answer_bits.shape == bits.shape[1:]
        given = _given_at(table, scale, bits, columns, block, error)
        table.add(error.dtype, (*given, table.at(answer_scale), table.at(answer_bits)), (1 / scale.shape[0], ratio))
    for dtype, places, factors in table:
        _settle_served_each(places, factors, LIKE[dtype], OCTETS)


def _given_at(table: Table, scale: Tensor, bits: Tensor, columns: int, block: int, error: Tensor) -> tuple[int, ...]:
    check(scale, bits, columns, block, columns, error)
    return bits.shape[0], columns, block, *table.rows(scale), *table.rows(bits), error.data_ptr(), error.numel()


@compiled
def _settle_each(places: Array, factors: Array, wide: Array, octets: Array) -> None:
    for i in range(len(places)):
        columns, block, scale, bits, error = signs_at(places[i], wide, octets)
        _, _, mean_scale, mean_bits, x = signs_at(places[i, 9:], wide, octets)
        ratio = wide.dtype.type(factors[i, 0])
        for r in range(scale.shape[0]):
            first, last = min(len(x), r * columns), min(len(x), (r + 1) * columns)
            for b in range(-(-columns // block)):
                end = min(last, first + (b + 1) * block)
                for j in range(min(last, first + b * block), end, CHUNK):
                    given, part = x[j : min(end, j + CHUNK)], error[j : min(end, j + CHUNK)]
                    add_in(given, part, ratio)
                    add_part(-scale[r, b], bits[r, (j - first) // 8 :], False, part, part)
                    put_part(mean_scale[r, b], mean_bits[r, (j - first) // 8 :], given)


@compiled
def _serve_each(places: Array, factors: Array, wide: Array, octets: Array) -> None:
    scratch = np.empty(STRIDE, wide.dtype)
    for i in range(len(places)):
        columns, block, scale, bits, error = signs_at(places[i], wide, octets)
        blocks = -(-columns // block)
        share, ratio = wide.dtype.type(factors[i, 0]), wide.dtype.type(factors[i, 1])
        sizes, answer = numbers(places[i, 9], blocks, wide), numbers(places[i, 10], -(-columns // 8), octets)
        answer[(len(error) + 7) // 8 :] = 0
        a = np.empty(min(block, len(error)), wide.dtype)
        for b in range(blocks):
            start, end = min(len(error), b * block), min(len(error), (b + 1) * block)
            for j in range(start, end, CHUNK):
                last = min(end, j + CHUNK)
                _sum_part(scale, bits, b, j, share, ratio, error[j:last], a[j - start : last - start])
            sizes[b] = encode_block(
                a[: end - start], None, ratio, scratch, 0, end - start, answer[start // 8 :], factors[i, 2]
            )


@compiled
def _settle_served_each(places: Array, factors: Array, wide: Array, octets: Array) -> None:
    for i in range(len(places)):
        columns, block, scale, bits, error = signs_at(places[i], wide, octets)
        blocks = -(-columns // block)
        share, ratio = wide.dtype.type(factors[i, 0]), wide.dtype.type(factors[i, 1])
        sizes, answer = numbers(places[i, 9], blocks, wide), numbers(places[i, 10], -(-columns // 8), octets)
        for b in range(blocks):
            end = min(len(error), (b + 1) * block)
            for j in range(min(len(error), b * block), end, CHUNK):
                part = error[j : min(end, j + CHUNK)]
                _sum_part(scale, bits, b, j, share, ratio, part, part)
                add_part(-sizes[b], answer[j // 8 :], False, part, part)


@compiled
def _sum_part(scale: Array, bits: Array, b: int, j: int, share: Any, ratio: Any, error: Array, out: Array) -> None:
    """Numbers of block ``b`` from ``j`` on: ratio * error + the mean of the rows, in their order."""
    for k in range(len(out)):
        out[k] = ratio * error[k]
    for i in range(scale.shape[0]):
        add_part(share * scale[i, b], bits[i, j // 8 :], False, out, out)
