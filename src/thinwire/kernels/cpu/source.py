"""What a method is given, as loops read it: numbers of 16 bits, and sums, which are made in passing.

Loops release the GIL, since the engine's threads run them side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from torch import Tensor

from thinwire.core.value import Sum, settled

Array = np.ndarray[Any, Any]
compiled = njit(nogil=True, cache=True)
CHUNK = 2048
"""Numbers that are worked on together; they stay in the nearest cache."""


def array(x: Tensor) -> Array:
    """The tensor's memory, or a copy's where it is strided. bf16 comes as int16, and fp16 as uint16: the bits."""
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy()
    return x.view(torch.uint16).numpy() if x.dtype == torch.float16 else x.numpy()


Source = tuple[Array, Array | None, Any, Array]


def source(x: Tensor | Sum, scratch: int = 0) -> Source:
    """What ``read`` needs: x, the error and its ratio, and memory for their sum, or for ``scratch`` widened numbers."""
    if isinstance(x, Sum) and x.pending and x.out.is_contiguous():
        x.pending = False
        error = array(x.error)
        return array(x.x), error, error.dtype.type(x.ratio), array(x.out)
    plain = array(settled(x))
    ratio = np.float64(1) if plain.dtype == np.float64 else np.float32(1)
    return plain, None, ratio, plain if plain.dtype.kind == "f" else np.empty(scratch, np.float32)


def read(x: Array, error: Array | None, ratio: Any, out: Array, start: int, end: int) -> Array:
    """Numbers ``start`` to ``end`` of x, or of x + ratio * error: those are left in ``out``."""
    raise NotImplementedError  # what it does depends on the types


@overload(read, strict=False, inline="always")
def _read(x: Any, error: Any, ratio: Any, out: Any, start: Any, end: Any) -> Any:
    wide = isinstance(x.dtype, types.Float)
    if isinstance(error, types.NoneType):

        def plain(x, error, ratio, out, start, end):  # type: ignore[no-untyped-def]
            return x[start:end]

        def widened(x, error, ratio, out, start, end):  # type: ignore[no-untyped-def]
            widen(x[start:end], out)
            return out[: end - start]

        return plain if wide else widened

    def summed(x, error, ratio, out, start, end):  # type: ignore[no-untyped-def]
        _add(x[start:end], error[start:end], ratio, out[start:end])
        return out[start:end]

    def widened_and_summed(x, error, ratio, out, start, end):  # type: ignore[no-untyped-def]
        widen(x[start:end], out[start:end])
        _add(out[start:end], error[start:end], ratio, out[start:end])
        return out[start:end]

    return summed if wide else widened_and_summed


def peek(x: Array, error: Array | None, ratio: Any, scratch: Array, start: int, end: int) -> Array:
    """Numbers ``start`` to ``end`` of x, or of x + ratio * error: those are in ``scratch``."""
    raise NotImplementedError


@overload(peek, strict=False, inline="always")
def _peek(x: Any, error: Any, ratio: Any, scratch: Any, start: Any, end: Any) -> Any:
    if isinstance(error, types.NoneType):

        def alone(x, error, ratio, scratch, start, end):  # type: ignore[no-untyped-def]
            return read(x, error, ratio, scratch, start, end)

        return alone

    def summed(x, error, ratio, scratch, start, end):  # type: ignore[no-untyped-def]
        part = scratch[: end - start]
        _add(read(x, None, ratio, scratch, start, end), error[start:end], ratio, part)
        return part

    return summed


@njit(nogil=True, cache=True, fastmath={"contract"})
def add_in(x: Array, error: Array, ratio: Any) -> None:
    """error = x + ratio * error"""
    for k in range(len(x)):
        error[k] = x[k] + ratio * error[k]


@njit(nogil=True, cache=True, fastmath={"contract"})  # rounded once, as torch's is
def _add(x: Array, error: Array, ratio: Any, out: Array) -> None:
    for k in range(len(x)):
        out[k] = x[k] + ratio * error[k]


def widen(x: Array, out: Array) -> None:
    """The numbers that 16 bits stand for."""
    raise NotImplementedError


@overload(widen, strict=False)
def _widen(x: Any, out: Any) -> Any:
    def bfloat16(x, out):  # type: ignore[no-untyped-def]
        bits = out.view(np.int32)
        for k in range(len(x)):
            bits[k] = np.int32(x[k]) << 16

    def float16(x, out):  # type: ignore[no-untyped-def]
        bits = out.view(np.uint32)
        for k in range(len(x)):
            bits[k] = np.uint32(x[k] & 0x7FFF) << 13
        for k in range(len(x)):
            # the exponents differ by 112; where all of its bits are set it is an infinity, or not a number
            out[k] *= np.float32(2.0**112)
        for k in range(len(x)):
            special = (x[k] & 0x7C00) == 0x7C00
            bits[k] |= np.uint32(0x7F800000 if special else 0) | np.uint32(x[k] & 0x8000) << 16

    return bfloat16 if x.dtype == types.int16 else float16
