"""The largest magnitudes; see ``reference``.

Magnitudes are ordered as their bits are, the sign's aside. One pass collects what reaches a bound that a sample
proposes; if that is enough and not too much, the rest of the choice is among the few.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.core.value import Sum
from thinwire.kernels.cpu.hashing import mixed
from thinwire.kernels.cpu.source import Array, array, compiled, read, source
from thinwire.kernels.cpu.vector import LANES, at_least, lowest

SAMPLE = 1 << 16
"""Numbers whose magnitudes propose the bound."""
DIGIT = 11
"""Bits that a round of the radix select decides; its counts stay in the nearest cache."""


def top_k(x: Tensor | Sum, k: int) -> tuple[Tensor, Tensor]:
    assert 1 <= k <= x.numel()
    given = source(x if isinstance(x, Sum) else x.to(torch.promote_types(x.dtype, torch.float32)))
    kind = np.int64 if given[3].itemsize == 8 else np.int32
    infinite = np.array(np.inf, given[3].dtype).view(kind)[()]
    values, places = torch.from_numpy(np.empty(k, given[3].dtype)), torch.empty(k, dtype=torch.int64)
    _top_k(*given, given[3].view(kind), infinite, array(values).view(kind), array(places))
    return values, places


@compiled
def _top_k(
    x: Array, error: Array | None, ratio: Any, p: Array, bits: Array, infinite: Any, values: Array, places: Array
) -> None:
    """``bits`` are those of ``p``; those of the chosen go to ``values``."""
    d, k = len(x), len(places)
    if d > 4 * SAMPLE and 8 * k < d:
        room = 2 * k + 8 * LANES
        found, where = np.empty(room, bits.dtype), np.empty(room, np.int64)
        least = _bound(x, error, ratio, p, bits, infinite, k)
        count = _collect(x, error, ratio, p, bits, least, found, where)
        if k <= count <= room - LANES:
            _choose(found[:count], infinite, places)
            for i in range(k):
                values[i] = found[places[i]]
                places[i] = where[places[i]]
            return
    else:
        read(x, error, ratio, p, 0, d)
    _choose(bits, infinite, places)
    for i in range(k):
        values[i] = bits[places[i]]


@compiled
def _bound(x: Array, error: Array | None, ratio: Any, p: Array, bits: Array, infinite: Any, k: int) -> Any:
    """A magnitude that very likely a few more than k reach."""
    sample, stride = np.empty(SAMPLE, p.dtype), len(x) // SAMPLE
    for i in range(SAMPLE):
        place: Any = i * stride + np.int64(mixed(np.uint32(i))) % stride
        one = sample[i : i + 1]
        one[0] = read(x[place : place + 1], _one(error, place), ratio, one, 0, 1)[0]
    expected = SAMPLE * k / len(x)
    return _kth(sample.view(bits.dtype), infinite, int(expected + 4 * np.sqrt(expected) + 4))[0]


@compiled
def _collect(
    x: Array, error: Array | None, ratio: Any, p: Array, bits: Array, least: Any, found: Array, where: Array
) -> int:
    """Read x, note what is at least ``least``, and return how many they are; where room runs out, it is full."""
    count, whole = 0, len(x) // LANES * LANES
    for j in range(0, whole, LANES):
        word = at_least(x, error, ratio, p, j, least)
        while word and count <= len(found) - LANES:
            place = j + lowest(word)
            found[count], where[count] = bits[place], place
            count += 1
            word &= word - np.uint32(1)
    read(x, error, ratio, p, whole, len(x))
    for place in range(whole, len(x)):
        if bits[place] & np.iinfo(bits.dtype).max >= least and count < len(found):
            found[count], where[count] = bits[place], place
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
