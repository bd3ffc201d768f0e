"""Values that a method hands back without making them: as factors or a payload, written where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor


class Deferred(Protocol):
    """A value that can be written into memory that exists: contiguous, and of a type that methods compute in.

    Where many are made faster than one by one, ``write_each`` and ``subtract_each`` of the class do it. Where both are
    made in one pass, ``settle_each`` does, of (sent, mean, p): p's error = p - sent, and p's x = mean. Where many are
    looked through faster, ``finite_each`` does.
    """

    def write(self, out: Tensor) -> None:
        """out = value"""

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        """out = p - value"""

    def finite(self) -> bool:
        """Whether all of the value is."""


Value = Tensor | Deferred
WIDE = (torch.float32, torch.float64)
"""The types that methods compute in."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """``values`` at ``indices`` of the flattened memory, zero elsewhere. Rows of them add up, in their order."""

    indices: Tensor  # (k,) or (rows, k), in a row no index twice
    values: Tensor

    def write(self, out: Tensor) -> None:
        self._add(out.zero_(), 1)

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        self._add(out.copy_(settled(p)), -1)

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


@dataclass(frozen=True, slots=True)
class Written:
    """A value that is finite, and stands in memory already."""

    memory: Tensor

    def write(self, out: Tensor) -> None:
        if out.data_ptr() != self.memory.data_ptr():
            out.copy_(self.memory)

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        torch.sub(settled(p), self.memory, out=out)

    def finite(self) -> bool:
        return True


class Sum:
    """p = x + ratio * error, made when it is first wanted: by a kernel that adds in passing, or by ``made``.

    It goes to the memory of ``x``, or to memory of its own where ``x`` is too narrow to hold it, or strided. A kernel
    that can do without leaves it unmade.
    """

    __slots__ = ("_made", "_memory", "_whole", "error", "fits", "ratio", "x")

    def __init__(self, x: Tensor, error: Tensor, ratio: float, whole: Sum | None = None) -> None:
        self.x = x
        self.error = error
        self.ratio = ratio
        self._whole = whole
        self.fits = whole is None and x.dtype == error.dtype and x.is_contiguous()
        """Whether the memory of ``x`` is that of p."""
        self._memory: Tensor | None = x if self.fits else None
        self._made = False

    @property
    def pending(self) -> bool:
        """Whether ``out`` does not hold p yet; who writes it there says so."""
        return self._whole.pending if self._whole is not None else not self._made

    @pending.setter
    def pending(self, value: bool) -> None:
        if self._whole is not None:
            self._whole.pending = value
        self._made = not value

    @property
    def out(self) -> Tensor:
        """The memory of p."""
        if self._memory is None:
            whole = self._whole
            new = torch.empty(self.shape, dtype=self.dtype, device=self.x.device) if whole is None else whole.out
            self._memory = new.view(self.shape)
        return self._memory

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.error.dtype

    def numel(self) -> int:
        return self.x.numel()

    def flatten(self, start: int = 0) -> Sum:
        """The same sum, over the same memory."""
        if self.x.dim() == start + 1:
            return self
        return Sum(self.x.flatten(start), self.error.flatten(start), self.ratio, self)

    def value(self) -> Tensor:
        """p, in memory of its own as long as it is not made."""
        return torch.add(self.x, self.error, alpha=self.ratio) if self.pending else self.out

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


def write_each(batch: Sequence[tuple[Tensor, Value]]) -> None:
    """The same for many."""
    together: dict[Any, list[tuple[Any, Tensor]]] = {}
    for out, value in batch:
        if value is out or (type(value) is Written and value.memory is out):
            continue
        if hasattr(value, "write_each") and out.is_contiguous() and out.dtype in WIDE:
            together.setdefault(type(value), []).append((value, out))
        else:
            write(out, value)
    for kind, members in together.items():
        kind.write_each(members)


def subtract(p: Tensor | Sum, value: Value, out: Tensor) -> None:
    """out = p - value"""
    if not isinstance(value, Tensor) and out.is_contiguous():
        value.subtract(p, out)
    else:
        torch.sub(settled(p), made(value, out), out=out)


def subtract_each(batch: Sequence[tuple[Tensor | Sum, Value, Tensor]]) -> None:
    """The same for many."""
    together: dict[Any, list[tuple[Any, Tensor | Sum, Tensor]]] = {}
    for p, value, out in batch:
        if hasattr(value, "subtract_each") and out.is_contiguous():
            together.setdefault(type(value), []).append((value, p, out))
        else:
            subtract(p, value, out)
    for kind, members in together.items():
        kind.subtract_each(members)


def settle_each(batch: Sequence[tuple[Tensor | Sum, Value, Value, Tensor, bool]]) -> list[Value]:
    """(p, sent, mean, error, keep): error = p - sent if the mean is finite; the mean, which is written over p's x where
    one pass makes both.

    ``keep``: x is wanted as it is.
    """
    together: dict[Any, list[tuple[Any, Any, Sum]]] = {}
    apart, means = [], []
    for (p, sent, mean, error, keep), good in zip(batch, all_finite([mean for _, _, mean, *_ in batch]), strict=True):
        if not good:
            means.append(mean)
            continue
        if not keep and type(sent) is type(mean) and hasattr(mean, "settle_each") and _unmade(p, error):
            together.setdefault(type(mean), []).append((sent, mean, p))
            mean = Written(p.x)
        else:
            apart.append((p, sent, error))
        means.append(mean)
    for kind, members in together.items():
        kind.settle_each(members)
    subtract_each(apart)
    return means


def _unmade(p: Tensor | Sum, error: Tensor) -> TypeGuard[Sum]:
    """Whether p is left to be made of x and this error, in the memory of either."""
    return isinstance(p, Sum) and p.pending and p.error is error and p.fits


def made(value: Value, like: Tensor) -> Tensor:
    """The value as a tensor in the shape of ``like``."""
    if isinstance(value, Tensor | Written):
        return value if isinstance(value, Tensor) else value.memory
    dtype = torch.promote_types(like.dtype, torch.float32)
    out = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    value.write(out)
    return out


def finite_each(tensors: Sequence[Tensor]) -> list[bool]:
    """Whether all of each tensor is finite."""
    rows = tensors[0].shape[:-1]
    alike = rows and all(t.shape[:-1] == rows for t in tensors)
    if finite(torch.cat(list(tensors) if alike else [t.reshape(-1) for t in tensors], dim=-1)):
        return [True] * len(tensors)
    return [finite(t) for t in tensors]


def all_finite(values: Sequence[Value]) -> list[bool]:
    """Of each value, whether all of it is finite."""
    together: dict[Any, list[Any]] = {}
    for value in values:
        if hasattr(value, "finite_each"):
            together.setdefault(type(value), []).append(value)
    found = {kind: iter(kind.finite_each(members)) for kind, members in together.items()}
    return [next(found[type(value)]) if type(value) in found else finite(value) for value in values]


def finite(value: Value) -> bool:
    """Whether all of ``value`` is finite."""
    if not isinstance(value, Tensor):
        return value.finite()
    # a finite sum has finite terms; the converse fails only on overflow, and is then looked at closely
    return value.is_meta or isfinite(value.sum().item()) or bool(value.isfinite().all())
