"""Hot loops, chosen by device and dtype. Callers use the functions here and never a module below.

``reference`` is the specification, and the path of every tensor without a kernel. A faster kernel is a module with
the functions of ``Kernels``, equal to ``reference`` in the tests, and a case in ``_for``.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from thinwire.core.value import WIDE, Sum
from thinwire.kernels import reference

MOST_COLUMNS = 16
"""Of a factor; with more of them the arithmetic outweighs the memory, and a library's matrix product is faster."""


class Kernels(Protocol):
    """What each module of kernels defines; ``reference`` says what they mean."""

    def encode_signs(
        self, x: Tensor | Sum, rows: int, columns: int, block: int, most: float
    ) -> tuple[Tensor, Tensor]: ...

    def decode_signs(self, scale: Tensor, bits: Tensor, columns: int, block: int, out: Tensor) -> None: ...

    def add_signs(
        self,
        scale: Tensor,
        bits: Tensor,
        columns: int,
        block: int,
        base: Tensor | Sum,
        alpha: float,
        out: Tensor,
        stacked: bool,
    ) -> None: ...

    def pack_bits(self, codes: Tensor, bits: int) -> Tensor: ...

    def unpack_bits(self, packed: Tensor, bits: int, count: int) -> Tensor: ...

    def encode_levels(
        self, x: Tensor | Sum, rows: int, columns: int, block: int, bits: int, key: int
    ) -> tuple[Tensor, Tensor]: ...

    def add_levels(
        self,
        scale: Tensor,
        codes: Tensor,
        columns: int,
        block: int,
        bits: int,
        base: Tensor,
        alpha: float,
        out: Tensor,
        stacked: bool,
    ) -> None: ...

    def count_sketch(self, x: Tensor, rows: int, columns: int, key: int) -> Tensor: ...

    def estimate(self, sketch: Tensor, d: int, key: int) -> Tensor: ...

    def top_k(self, x: Tensor | Sum, k: int) -> tuple[Tensor, Tensor]: ...


class LowRankKernels(Protocol):
    """Those of the low-rank methods; x, which may be of 16 bits, error and out are matrices."""

    def orthogonalize(self, P: Tensor) -> Tensor: ...

    def product(self, x: Tensor, error: Tensor, ratio: float, Q: Tensor) -> Tensor: ...

    def transposed_product(self, x: Tensor, error: Tensor, ratio: float, P: Tensor) -> Tensor: ...

    def subtract_product(self, x: Tensor, error: Tensor, ratio: float, P: Tensor, Q: Tensor) -> None: ...

    def write_product(self, P: Tensor, Q: Tensor, out: Tensor) -> None: ...


def encode_signs(x: Tensor | Sum, rows: int, columns: int, block: int, most: float = 1.0) -> tuple[Tensor, Tensor]:
    return _reading(x).encode_signs(x, rows, columns, block, most)


def decode_signs(scale: Tensor, bits: Tensor, columns: int, block: int, out: Tensor) -> None:
    _for(out).decode_signs(scale, bits, columns, block, out)


def add_signs(
    scale: Tensor,
    bits: Tensor,
    columns: int,
    block: int,
    base: Tensor | Sum,
    alpha: float,
    out: Tensor,
    stacked: bool = False,
) -> None:
    _for(out).add_signs(scale, bits, columns, block, base, alpha, out, stacked)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    return _for(codes).pack_bits(codes, bits)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    return _for(packed).unpack_bits(packed, bits, count)


def encode_levels(x: Tensor | Sum, rows: int, columns: int, block: int, bits: int, key: int) -> tuple[Tensor, Tensor]:
    return _reading(x).encode_levels(x, rows, columns, block, bits, key)


def add_levels(
    scale: Tensor,
    codes: Tensor,
    columns: int,
    block: int,
    bits: int,
    base: Tensor,
    alpha: float,
    out: Tensor,
    stacked: bool = False,
) -> None:
    _for(out).add_levels(scale, codes, columns, block, bits, base, alpha, out, stacked)


def count_sketch(x: Tensor, rows: int, columns: int, key: int) -> Tensor:
    return _for(x).count_sketch(x, rows, columns, key)


def estimate(sketch: Tensor, d: int, key: int) -> Tensor:
    return _for(sketch).estimate(sketch, d, key)


def top_k(x: Tensor | Sum, k: int) -> tuple[Tensor, Tensor]:
    return _reading(x).top_k(x, k)


def orthogonalize(P: Tensor) -> Tensor:
    return _low_rank_for(P, P[0]).orthogonalize(P)


def product(x: Tensor, error: Tensor, ratio: float, Q: Tensor) -> Tensor:
    return _low_rank_for(error, Q).product(x, error, ratio, Q)


def transposed_product(x: Tensor, error: Tensor, ratio: float, P: Tensor) -> Tensor:
    return _low_rank_for(error, P).transposed_product(x, error, ratio, P)


def subtract_product(x: Tensor, error: Tensor, ratio: float, P: Tensor, Q: Tensor) -> None:
    _low_rank_for(error, P).subtract_product(x, error, ratio, P, Q)


def write_product(P: Tensor, Q: Tensor, out: Tensor) -> None:
    (_low_rank_for(out, P) if P.shape[1] <= 4 else reference).write_product(P, Q, out)


def _low_rank_for(x: Tensor, factor: Tensor) -> LowRankKernels:
    if x.is_cpu and x.dtype in (torch.float32, torch.float64) and factor.shape[1] <= MOST_COLUMNS:
        return _cpu_low_rank()
    return reference


@cache
def _cpu_low_rank() -> LowRankKernels:
    from thinwire.kernels.cpu import lowrank

    return lowrank


def _for(x: Tensor) -> Kernels:
    if x.device.type == "cpu" and x.dtype in (*WIDE, torch.uint8):
        from thinwire.kernels import cpu  # here, so that only its users pay for importing numba

        return cpu
    return reference


def _reading(x: Tensor | Sum) -> Kernels:
    """For a kernel that takes what a method is given: numbers of 16 bits too, and sums, which it makes in passing."""
    given = x.x if isinstance(x, Sum) else x
    narrow = given.dtype in (torch.bfloat16, torch.float16) and x.dtype in (given.dtype, torch.float32)
    return _for(given.new_empty(0, dtype=torch.float32)) if narrow else _for(given)
