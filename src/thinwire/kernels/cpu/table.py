"""Many tensors in one call: a kernel is handed a table of where they lie, a row for each.

Calling a compiled function costs some microseconds for each array. A model of many small layers would spend more on
that than on its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import overload
from torch import Tensor

from thinwire.kernels.cpu.source import Array, compiled
from thinwire.kernels.cpu.vector import intrinsic

LIKE: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
    torch.bfloat16: np.empty(0, np.int16),  # the bits, as ``widen`` takes them
    torch.float16: np.empty(0, np.uint16),
    torch.uint8: np.empty(0, np.uint8),
}
"""An array of a tensor's kind, by which ``numbers`` knows what lies at an address."""


class Table:
    """A kernel's arguments: places and sizes, and factors, a row of each for every tensor, by the tensors' kinds."""

    def __init__(self) -> None:
        self._rows: dict[Any, tuple[int, list[int], list[float]]] = {}
        """How many places a row has, and the rows end to end: an array is made of that in half the time."""
        self._held: list[Tensor] = []

    def __iter__(self) -> Iterator[tuple[Any, Array, Array]]:
        for kind, (length, places, factors) in self._rows.items():
            count = len(places) // length
            yield kind, np.array(places, np.intp).reshape(count, -1), np.array(factors, np.float64).reshape(count, -1)

    def add(self, kind: Any, places: Sequence[int], factors: Sequence[float] = ()) -> None:
        row = self._rows.get(kind)
        if row is None:
            row = self._rows[kind] = len(places), [], []
        row[1].extend(places)
        row[2].extend(factors)

    def at(self, x: Tensor | None) -> int:
        """Where its memory is, or a copy's that lives as long as the table, where it is strided."""
        if x is None:
            return 0
        if not x.is_contiguous():
            x = x.contiguous()
            self._held.append(x)
        return x.data_ptr()

    def rows(self, x: Tensor) -> tuple[int, int]:
        """Of a matrix with rows end to end or apart: where the first is, and how far from one to the next."""
        apart, next_to = x.stride()
        return (x.data_ptr(), apart) if next_to == 1 else (self.at(x), x.shape[1])


@intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    pointer = types.CPointer(like.dtype)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.intp, like), generate


def numbers(address: Any, count: Any, like: Array | None) -> Any:
    """The array of ``count`` numbers there; None where there is nothing to be like."""
    raise NotImplementedError


@overload(numbers, strict=False)
def _numbers(address: Any, count: Any, like: Any) -> Any:
    if isinstance(like, types.NoneType):
        return lambda address, count, like: None
    return lambda address, count, like: carray(_pointer(address, like), count)


@compiled
def matrix(address: Any, rows: Any, columns: Any, like: Array) -> Any:
    return carray(_pointer(address, like), (rows, columns))
