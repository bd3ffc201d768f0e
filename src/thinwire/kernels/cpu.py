"""The kernels on the CPU: numba loops over rows, in place on the tensors' own memory.

They release the GIL, since the engine's threads run them side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from thinwire.kernels.reference import block_sizes

Array = np.ndarray[Any, Any]
compiled = njit(nogil=True, cache=True, fastmath=False)


def encode_signs(x: Tensor, sizes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    lead, n = x.shape[:-1], x.shape[-1]
    width, blocks = -(-n // 8), -(-n // block)
    total = x.new_empty(*lead, blocks, dtype=torch.float64)
    bits = x.new_empty(*lead, width, dtype=torch.uint8)
    _encode_signs(_rows(x, lead, n), _rows(total, lead, blocks), _rows(bits, lead, width), block)
    return (total / block_sizes(sizes, blocks, block)).to(x.dtype), bits


def decode_signs(scale: Tensor, bits: Tensor, n: int, block: int) -> Tensor:
    lead = bits.shape[:-1]
    out = scale.new_empty(*lead, n)
    _decode_signs(_rows(scale, lead, -(-n // block)), _rows(bits, lead, -(-n // 8)), _rows(out, lead, n), block)
    return out


def _rows(x: Tensor, lead: torch.Size, n: int) -> Array:
    """x as (rows, n). The view checks the shape, which the loops do not."""
    return x.detach().contiguous().view(lead.numel(), n).numpy()


@compiled
def _encode_signs(x: Array, total: Array, bits: Array, block: int) -> None:
    rows, n = x.shape
    for r in range(rows):
        for b in range(total.shape[1]):
            start, end = b * block, min(n, (b + 1) * block)
            whole = end - (end - start) % 8
            sums = np.zeros(8)  # one for each column of a byte: a single one could not be vectorised
            for j in range(start, whole, 8):
                bits[r, j // 8] = _pack(x[r], j, 8, sums)
            if whole < end:
                bits[r, whole // 8] = _pack(x[r], whole, end - whole, sums)
            total[r, b] = sums.sum()


@compiled
def _decode_signs(scale: Array, bits: Array, out: Array, block: int) -> None:
    rows, n = out.shape
    for r in range(rows):
        for b in range(scale.shape[1]):
            start, end = b * block, min(n, (b + 1) * block)
            whole = end - (end - start) % 8
            for j in range(start, whole, 8):
                _unpack(scale[r, b], bits[r, j // 8], out[r], j, 8)
            if whole < end:
                _unpack(scale[r, b], bits[r, whole // 8], out[r], whole, end - whole)


# The two below are inlined where they are called, so a count of 8 is unrolled into vector instructions.


@compiled
def _pack(x: Array, start: int, count: int, sums: Array) -> int:
    byte = 0
    for k in range(count):
        sums[k] += abs(np.float64(x[start + k]))
        byte |= (x[start + k] >= 0) << k
    return byte


@compiled
def _unpack(scale: float, byte: int, out: Array, start: int, count: int) -> None:
    for k in range(count):
        out[start + k] = scale if byte >> k & 1 else -scale
