"""The largest magnitudes; see ``reference``.

Magnitudes are ordered as their bits are, the sign's aside. One pass collects what is at least as large as a bound, which
a sample proposes; if that is enough and not too much, the rest of the choice is among the few.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.value import Sum
from thinwire.kernels.cpu.hashing import mixed
from thinwire.kernels.cpu.vector import CHUNK, LANES, Array, array, at_least, compiled, lowest, read, source

SAMPLE = 1 << 16
"""Numbers whose magnitudes propose the bound."""
DIGIT = 11
"""Bits that a round of the radix select decides; its counts stay in the nearest cache."""


def top_k(x: Tensor | Sum, k: int) -> Tensor:
    assert 1 <= k <= x.numel()
    places = torch.empty(k, dtype=torch.int64)
    given = source(x if isinstance(x, Sum) else x.to(torch.promote_types(x.dtype, torch.float32)))
    wide = given[3].itemsize == 8
    bits = given[3].view(np.int64 if wide else np.int32)
    _top_k(*given, bits, bits.dtype.type(0x7FF << 52 if wide else 0xFF << 23), array(places))
    return places


@compiled
def _top_k(x: Array, error: Array | None, ratio: Any, p: Array, bits: Array, infinite: Any, places: Array) -> None:
    """``bits`` are those of ``p``."""
    d, k = len(x), len(places)
    few = d > 4 * SAMPLE and 8 * k < d
    least = _bound(x, error, ratio, p, bits, infinite, k) if few else infinite
    room = 2 * k + CHUNK if few else 0
    sizes, found, count = np.empty(room, bits.dtype), np.empty(room, np.int64), 0
    for start in range(0, d, CHUNK):
        end = min(d, start + CHUNK)
        read(x, error, ratio, p, start, end)
        if count + CHUNK <= room:
            count = _collect(bits[start:end], least, start, sizes, found, count)
    if k <= count <= room - CHUNK:
        _choose(sizes[:count], infinite, places)
        for i in range(k):
            places[i] = found[places[i]]
    else:
        _choose(bits, infinite, places)


@compiled
def _bound(x: Array, error: Array | None, ratio: Any, p: Array, bits: Array, infinite: Any, k: int) -> Any:
    """A magnitude that very likely a few more than k reach."""
    sample, stride = np.empty(SAMPLE, p.dtype), len(x) // SAMPLE
    for i in range(SAMPLE):
        place = i * stride + np.int64(mixed(np.uint32(i))) % stride
        one = sample[i : i + 1]
        one[0] = read(x[place : place + 1], _one(error, place), ratio, one, 0, 1)[0]
    expected = SAMPLE * k / len(x)
    return _kth(sample.view(bits.dtype), infinite, int(expected + 4 * np.sqrt(expected) + 4))[0]


@compiled
def _collect(bits: Array, least: Any, start: int, sizes: Array, found: Array, count: int) -> int:
    """Note those of ``bits`` that are at least ``least``, and their places; return how many are noted by now."""
    whole = len(bits) // LANES * LANES
    for j in range(0, whole, LANES):
        word = at_least(bits, j, least)
        while word:
            k = j + lowest(word)
            sizes[count], found[count] = bits[k], start + k
            count += 1
            word &= word - np.uint32(1)
    for k in range(whole, len(bits)):
        if bits[k] & np.iinfo(bits.dtype).max >= least:
            sizes[count], found[count] = bits[k], start + k
            count += 1
    return count


@compiled
def _choose(bits: Array, infinite: Any, places: Array) -> None:
    least, left = _kth(bits, infinite, len(places))
    taken, unsigned = 0, np.iinfo(bits.dtype).max
    for i in range(len(bits)):
        size = min(bits[i] & unsigned, infinite)
        if size > least or (size == least and left > 0):
            left -= size == least
            places[taken] = i
            taken += 1


@compiled
def _kth(bits: Array, infinite: Any, k: int) -> Any:
    """The k-th magnitude, by a radix select; and how many of those that equal it are among the k largest."""
    unsigned, least, left = np.iinfo(bits.dtype).max, np.int64(0), k
    counts = np.empty(1 << DIGIT, np.int64)
    known = bits.itemsize * 8 - 1  # the bits below are yet to be found
    while known > 0:
        width = min(DIGIT, known)
        shift = known - width
        counts[:] = 0
        for i in range(len(bits)):
            size = np.int64(min(bits[i] & unsigned, infinite))  # NaN too is infinite
            if size >> known == least:
                counts[size >> shift & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        least = least << width | digit
        known = shift
    return least, left


@compiled
def _one(error: Array | None, place: int) -> Array | None:
    return None if error is None else error[place : place + 1]

