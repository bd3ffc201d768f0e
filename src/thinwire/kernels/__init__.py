"""Hot loops, chosen by device and dtype. Callers use the functions here and never a module below.

``reference`` is the specification, and the path of every tensor without a kernel. A faster kernel is a module with
the functions of ``Kernels``, equal to ``reference`` in the tests, and a case in ``_for``. Those of signs and low rank,
which models of many small layers call most, take a batch: a list of what ``reference`` takes, in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.core.value import WIDE, Sum
from thinwire.kernels import reference

MOST_COLUMNS = 16
"""Of a factor; with more of them the arithmetic outweighs the memory, and a library's matrix product is faster."""


class Kernels(Protocol):
    """What each module of kernels defines; ``reference`` says what they mean."""

    def pack_bits(self, codes: Tensor, bits: int) -> Tensor: ...

    def unpack_bits(self, packed: Tensor, bits: int, count: int) -> Tensor: ...

    def encode_levels(
        self, x: Tensor | Sum, rows: int, columns: int, block: int, bits: int, norm: float, key: int
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


def encode_signs(batch: Sequence[tuple[Tensor | Sum, int, int, int, float]]) -> list[tuple[Tensor, Tensor]]:
    return _each(_cpu, "encode_signs", batch, [(x.x if isinstance(x, Sum) else x).is_cpu for x, *_ in batch])


def decode_signs(batch: Sequence[tuple[Tensor, Tensor, int, int, Tensor]]) -> None:
    _each(_cpu, "decode_signs", batch, [out.is_cpu for *_, out in batch])


def add_signs(batch: Sequence[tuple[Tensor, Tensor, int, int, Tensor | Sum, float, Tensor, bool]]) -> None:
    _each(_cpu, "add_signs", batch, [out.is_cpu for *_, out, _ in batch])


def settle_signs(
    batch: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, int, int, Tensor, Tensor, float]],
) -> None:
    _each(_cpu, "settle_signs", batch, [x.is_cpu for *_, x, _, _ in batch])


def serve_signs(
    batch: Sequence[tuple[Tensor, Tensor, int, int, Tensor, float, float]],
) -> list[tuple[Tensor, Tensor]]:
    return _each(_cpu, "serve_signs", batch, [error.is_cpu for *_, error, _, _ in batch])


def settle_served_signs(
    batch: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, int, int, Tensor, float]],
) -> None:
    _each(_cpu, "settle_served_signs", batch, [error.is_cpu for *_, error, _ in batch])


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    return _for(codes).pack_bits(codes, bits)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    return _for(packed).unpack_bits(packed, bits, count)


def encode_levels(
    x: Tensor | Sum, rows: int, columns: int, block: int, bits: int, norm: float, key: int
) -> tuple[Tensor, Tensor]:
    return _reading(x).encode_levels(x, rows, columns, block, bits, norm, key)


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


def orthogonalize(batch: Sequence[Tensor]) -> list[Tensor]:
    return _each(_low_rank, "orthogonalize", [(P,) for P in batch], [_narrow_on_cpu(P) for P in batch])


def bounded(batch: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    return _each(_low_rank, "bounded", batch, [_narrow_on_cpu(P) for P, _ in batch])


def product(batch: Sequence[tuple[Tensor, Tensor, float, Tensor]]) -> list[Tensor]:
    return _each(_low_rank, "product", batch, [_narrow_on_cpu(Q) for *_, Q in batch])


def transposed_product(batch: Sequence[tuple[Tensor, Tensor, float, Tensor]]) -> list[Tensor]:
    return _each(_low_rank, "transposed_product", batch, [_narrow_on_cpu(P) for *_, P in batch])


def subtract_product(batch: Sequence[tuple[Tensor, Tensor, float, Tensor, Tensor]]) -> None:
    _each(_low_rank, "subtract_product", batch, [_narrow_on_cpu(P) for *_, P, _ in batch])


def settle_product(batch: Sequence[tuple[Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor]]) -> None:
    _each(_low_rank, "settle_product", batch, [_narrow_on_cpu(N) for *_, N in batch])


def write_product(batch: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    _each(_low_rank, "write_product", batch, [_narrow_on_cpu(P) and P.shape[1] <= 4 for P, *_ in batch])


def _each(module: Callable[[], Any], kernel: str, batch: Sequence[Any], fast: Sequence[bool]) -> list[Any]:
    """The answers for all of the batch: those that are ``fast`` by the module's kernel, in one call."""
    if all(fast) and batch:
        return getattr(module(), f"{kernel}_each")(batch) or [None] * len(batch)
    together = [args for args, one in zip(batch, fast, strict=True) if one]
    answers = iter((getattr(module(), f"{kernel}_each")(together) if together else None) or repeat(None))
    alone = getattr(reference, kernel)
    return [next(answers) if one else alone(*args) for args, one in zip(batch, fast, strict=True)]


def _narrow_on_cpu(factor: Tensor) -> bool:
    return factor.is_cpu and factor.shape[1] <= MOST_COLUMNS


@cache
def _cpu() -> Any:
    from thinwire.kernels import cpu  # here, so that only its users pay for importing numba

    return cpu


@cache
def _low_rank() -> Any:
    from thinwire.kernels.cpu import lowrank

    return lowrank


def _for(x: Tensor) -> Kernels:
    if x.device.type == "cpu" and x.dtype in (*WIDE, torch.uint8):
        found: Kernels = _cpu()
        return found
    return reference


def _reading(x: Tensor | Sum) -> Kernels:
    """For a kernel that takes what a method is given: numbers of 16 bits too, and sums, which it makes in passing."""
    given = x.x if isinstance(x, Sum) else x
    narrow = given.dtype in (torch.bfloat16, torch.float16) and x.dtype in (given.dtype, torch.float32)
    return _for(given.new_empty(0, dtype=torch.float32)) if narrow else _for(given)
