"""Codes of a few bits, end to end; see ``reference``."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from thinwire.kernels.cpu.source import Array, array, compiled


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    packed = codes.new_empty(len(codes), -(-codes.shape[1] * bits // 8))
    _pack_rows(array(codes), bits, array(packed))
    return packed


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    assert packed.shape[1] == -(-count * bits // 8)
    codes = packed.new_empty(len(packed), count)
    _unpack_rows(array(packed), bits, array(codes))
    return codes


@compiled
def _pack_rows(codes: Array, bits: int, packed: Array) -> None:
    for r in range(codes.shape[0]):
        pack(codes[r], bits, packed[r])


@compiled
def _unpack_rows(packed: Array, bits: int, codes: Array) -> None:
    for r in range(codes.shape[0]):
        unpack(packed[r], bits, codes[r])


@compiled
def pack(codes: Array, bits: int, packed: Array) -> None:
    """All codes, to the first bytes of ``packed``."""
    whole = len(codes) // 8 * 8
    if bits == 4:
        for q in range(whole // 2):
            packed[q] = codes[2 * q] | codes[2 * q + 1] << 4
    else:
        for j in range(0, whole, 8):
            _store(_word_of(codes[j : j + 8], bits), packed, j // 8 * bits, bits)
    if whole < len(codes):
        last = codes[whole:]
        _store(_word_of(last, bits), packed, whole // 8 * bits, (len(last) * bits + 7) // 8)


@compiled
def unpack(packed: Array, bits: int, codes: Array) -> None:
    """The first codes of ``packed``, as many as there is room for."""
    whole = len(codes) // 8 * 8
    if bits == 4:
        for q in range(whole // 2):
            codes[2 * q] = packed[q] & 15
            codes[2 * q + 1] = packed[q] >> 4
    else:
        for j in range(0, whole, 8):
            _codes_of(_load(packed, j // 8 * bits, bits), bits, codes[j : j + 8])
    if whole < len(codes):
        last = codes[whole:]
        _codes_of(_load(packed, whole // 8 * bits, (len(last) * bits + 7) // 8), bits, last)


@compiled
def _word_of(codes: Array, bits: int) -> Any:
    word = np.uint64(0)
    for k in range(len(codes)):
        word |= np.uint64(codes[k]) << np.uint64(k * bits)
    return word


@compiled
def _codes_of(word: Any, bits: int, codes: Array) -> None:
    mask = np.uint64((1 << bits) - 1)
    for k in range(len(codes)):
        codes[k] = word & mask
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
