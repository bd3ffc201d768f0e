"""Values that a method hands back without making them: as factors or a payload, written where they are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Deferred(Protocol):
    """A value that can be written into memory that exists: contiguous, and of a type that methods compute in."""

    def write(self, out: Tensor) -> None:
        """out = value"""

    def subtract(self, p: Tensor, out: Tensor) -> None:
        """out = p - value"""

    def finite(self) -> bool:
        """Whether all of the value is."""


Value = Tensor | Deferred
WIDE = (torch.float32, torch.float64)
"""The types that methods compute in."""


@dataclass(frozen=True, slots=True)
class Product:
    """P Q^T, in the shape of the memory that it is written to."""

    P: Tensor  # (n, r)
    Q: Tensor  # (m, r)

    def write(self, out: Tensor) -> None:
        torch.mm(self.P, self.Q.mT, out=out.flatten(1))

    def subtract(self, p: Tensor, out: Tensor) -> None:
        torch.addmm(p.flatten(1), self.P, self.Q.mT, alpha=-1, out=out.flatten(1))

    def finite(self) -> bool:
        return finite(self.P.norm() * self.Q.norm())  # bounds every entry of the product


@dataclass(frozen=True, slots=True)
class Sparse:
    """``values`` at ``indices`` of the flattened memory, zero elsewhere. Rows of them add up, in their order."""

    indices: Tensor  # (k,) or (rows, k), in a row no index twice
    values: Tensor

    def write(self, out: Tensor) -> None:
        self._add(out.zero_(), 1)

    def subtract(self, p: Tensor, out: Tensor) -> None:
        self._add(out.copy_(p), -1)

    def finite(self) -> bool:
        return finite(self.values)

    def clear(self, out: Tensor) -> None:
        """out = 0 wherever there is a value."""
        out.view(-1)[self.indices] = 0

    def _add(self, out: Tensor, alpha: int) -> None:
        k = self.indices.shape[-1]
        # a row at a time: on some devices the order of additions to one place is not fixed within a call
        for indices, values in zip(self.indices.view(-1, k), self.values.view(-1, k), strict=True):
            out.view(-1).index_add_(0, indices, values, alpha=alpha)


class Sum:
    """p = x + ratio * error, made when it is first wanted: by a kernel that adds in passing, or by ``made``.

    It goes to the memory of ``x``, or to memory of its own where ``x`` is too narrow to hold it, or strided.
    """

    __slots__ = ("error", "out", "pending", "ratio", "x")

    def __init__(self, x: Tensor, error: Tensor, ratio: float, out: Tensor | None = None) -> None:
        self.x = x
        self.error = error
        self.ratio = ratio
        self.out = x if out is None else out
        if out is None and not (x.dtype == error.dtype and x.is_contiguous()):
            self.out = torch.empty(x.shape, dtype=error.dtype, device=x.device)
        self.pending = True
        """Whether ``out`` does not hold p yet; who writes it there says so."""

    @property
    def shape(self) -> torch.Size:
        return self.out.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.out.dtype

    def numel(self) -> int:
        return self.out.numel()

    def flatten(self, start: int = 0) -> Sum:
        """The same sum, over the same memory of ``out``."""
        assert self.pending
        return Sum(self.x.flatten(start), self.error.flatten(start), self.ratio, self.out.flatten(start))

    def made(self) -> Tensor:
        if self.pending:
            torch.add(self.x, self.error, alpha=self.ratio, out=self.out)
            self.pending = False
        return self.out


def settled(x: Tensor | Sum) -> Tensor:
    """The tensor itself, or the sum, made."""
    return x.made() if isinstance(x, Sum) else x


def wide(x: Tensor) -> Tensor:
    """x in a type that methods compute in."""
    return x if x.dtype in WIDE else x.float()


def write(out: Tensor, value: Value) -> None:
    """out = value; nothing happens where a tensor is that memory already."""
    if not isinstance(value, Tensor) and out.is_contiguous() and out.dtype in WIDE:
        value.write(out)
        return
    tensor = made(value, out)
    if tensor.data_ptr() != out.data_ptr():
        out.copy_(tensor)


def subtract(p: Tensor, value: Value, out: Tensor) -> None:
    """out = p - value"""
    if not isinstance(value, Tensor) and out.is_contiguous():
        value.subtract(p, out)
    else:
        torch.sub(p, made(value, p), out=out)


def made(value: Value, like: Tensor) -> Tensor:
    """The value as a tensor in the shape of ``like``."""
    if isinstance(value, Tensor):
        return value
    dtype = torch.promote_types(like.dtype, torch.float32)
    out = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    value.write(out)
    return out


def finite(value: Value) -> bool:
    """Whether all of ``value`` is finite."""
    if not isinstance(value, Tensor):
        return value.finite()
    # a finite sum has finite terms; the converse fails only on overflow, and is then looked at closely
    return value.is_meta or bool(value.sum().isfinite()) or bool(value.isfinite().all())
