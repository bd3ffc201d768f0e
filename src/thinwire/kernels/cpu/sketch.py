"""Count sketches; see ``reference``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.cpu.hashing import mixed
from thinwire.kernels.cpu.source import Array, array, compiled
from thinwire.kernels.cpu.vector import add_flipped, put_flipped
from thinwire.kernels.reference import MASK, RUN, row_keys, run_length

TOGETHER = 1024
"""Numbers that are worked on together; they stay in the nearest cache."""


def count_sketch(x: Tensor, rows: int, columns: int, key: int) -> Tensor:
    run = run_length(columns)
    sketch = x.new_zeros(rows, columns + run)  # each row goes on for a run, so that none need stop at its end
    _count(array(x), np.array(row_keys(rows, key), np.uint32), columns, run, array(sketch))
    sketch[:, :run] += sketch[:, columns:]
    return sketch[:, :columns].contiguous()


def estimate(sketch: Tensor, d: int, key: int) -> Tensor:
    rows, columns = sketch.shape
    assert rows % 2
    out, run = sketch.new_empty(d), run_length(columns)
    longer = torch.cat([sketch, sketch[:, :run]], 1)
    _estimate(array(longer), np.array(row_keys(rows, key), np.uint32), columns, run, array(out))
    return out


@compiled
def _count(x: Array, salts: Array, columns: int, run: int, sketch: Array) -> None:
    starts, signs = np.empty(TOGETHER, np.int64), np.empty(TOGETHER, np.uint32)
    for first in range(0, len(x), TOGETHER):
        numbers = x[first : first + TOGETHER]
        whole = len(numbers) // RUN if run == RUN else 0
        for r in range(len(salts)):
            row = sketch[r]
            _hash(first // run, TOGETHER // run, salts[r], columns, starts, signs)
            for q in range(whole):
                add_flipped(row, starts[q], numbers, q * RUN, signs[q])
            for j in range(whole * RUN, len(numbers)):
                negative = signs[j // run] >> np.uint32(j % run) & np.uint32(1)
                row[starts[j // run] + j % run] += -numbers[j] if negative else numbers[j]


@compiled
def _estimate(sketch: Array, salts: Array, columns: int, run: int, out: Array) -> None:
    rows = len(salts)
    guesses = np.zeros((rows, TOGETHER), out.dtype)
    starts, signs = np.empty(TOGETHER, np.int64), np.empty(TOGETHER, np.uint32)
    for first in range(0, len(out), TOGETHER):
        count = min(TOGETHER, len(out) - first)
        whole = count // RUN if run == RUN else 0
        for r in range(rows):
            row, guess = sketch[r], guesses[r]
            _hash(first // run, TOGETHER // run, salts[r], columns, starts, signs)
            for q in range(whole):
                put_flipped(guess, q * RUN, row, starts[q], signs[q])
            for j in range(whole * RUN, count):
                negative = signs[j // run] >> np.uint32(j % run) & np.uint32(1)
                found = row[starts[j // run] + j % run]
                guess[j] = -found if negative else found
        if rows == 5:
            _middle(guesses[0], guesses[1], guesses[2], guesses[3], guesses[4], out[first : first + count])
            continue
        # the rows sorted by exchanges of neighbours, many numbers at a time, as far as the middle one
        for last in range(rows - 1, rows // 2 - 1, -1):
            for r in range(last):
                _exchange(guesses[r], guesses[r + 1])
        out[first : first + count] = guesses[rows // 2, :count]


@compiled
def _hash(first: int, runs: int, salt: Any, columns: int, starts: Array, signs: Array) -> None:
    for q in range(runs):
        bits = mixed(mixed(np.uint32(first + q)) ^ salt)
        starts[q] = np.int64(bits) * columns >> 32
        signs[q] = mixed(bits ^ np.uint32(MASK))


@compiled
def _exchange(low: Array, high: Array) -> None:
    for k in range(len(low)):
        a, b = low[k], high[k]
        low[k] = b if b < a else a
        high[k] = a if b < a else b


@compiled
def _middle(v: Array, w: Array, x: Array, y: Array, z: Array, out: Array) -> None:
    """The median of five: neither of two pairs' larger larger one, nor their smaller smaller one, can be it."""
    for k in range(len(out)):
        low = _larger(_smaller(v[k], w[k]), _smaller(x[k], y[k]))
        high = _smaller(_larger(v[k], w[k]), _larger(x[k], y[k]))
        out[k] = _larger(_smaller(low, high), _smaller(_larger(low, high), z[k]))


@compiled
def _smaller(a: Any, b: Any) -> Any:
    return b if b < a else a


@compiled
def _larger(a: Any, b: Any) -> Any:
    return a if b < a else b
