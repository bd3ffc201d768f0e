"""The compressor that compresses nothing: numbers that go uncompressed, in the collectives of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.core.value import Sum, finite_each

B = TypeVar("B")

FEW = 1 << 18
"""Numbers that are made at once of several tensors; of a larger one, its own."""


class Raw(NamedTuple):
    """A payload that is the numbers themselves."""

    values: Tensor  # (rows, columns)


@dataclass(frozen=True, slots=True)
class Identity:
    """The numbers themselves, in ``dtype``. All vectors of a batch are one for as long as they are computed with."""

    unmade: ClassVar[bool] = True
    fused: ClassVar[bool] = False
    dtype: torch.dtype

    def encode(self, batch: Sequence[tuple[Tensor | Sum, int, int]]) -> list[Raw]:
        found = []
        for some in few(batch, lambda one: one[0].numel()):
            narrow = _end_to_end([x.flatten() for x, _, _ in some]).to(self.dtype)
            for (x, rows, columns), own in zip(some, _apart(narrow, [x.numel() for x, _, _ in some]), strict=True):
                missing = rows * columns - x.numel()
                found.append(Raw((pad(own, (0, missing)) if missing else own).view(rows, columns)))
        return found

    def decode(self, batch: Sequence[tuple[Raw, int, Tensor]]) -> None:
        outs = [out for _, _, out in batch]
        torch._foreach_copy_(outs, [_first(raw.values.reshape(-1), out.numel()) for raw, _, out in batch])

    def add(self, batch: Sequence[tuple[Raw, int, Tensor | Sum, float, Tensor, bool]]) -> None:
        alike: dict[Any, list[Any]] = {}
        for payload, _, base, alpha, out, stacked in batch:
            alike.setdefault((alpha, stacked, out.dtype), []).append((payload.values, base, out))
        for (alpha, stacked, dtype), members in alike.items():
            for some in few(members, lambda one: one[2].numel()):
                values, bases, outs = zip(*some, strict=True)
                if stacked:
                    values = _apart(torch.cat(values, dim=1).sum(0, dtype=dtype), [v.shape[1] for v in values])
                sizes = [out.numel() for out in outs]
                flat = torch.cat([_first(v.reshape(-1), size) for v, size in zip(values, sizes, strict=True)])
                torch._foreach_copy_(outs, _apart(torch.add(_end_to_end(bases), flat, alpha=alpha), sizes))

    def finite(self, batch: Sequence[Raw]) -> list[bool]:
        return finite_each([payload.values for payload in batch])


def _end_to_end(vectors: Sequence[Tensor | Sum]) -> Tensor:
    """As one; sums stay unmade."""
    first = vectors[0]
    if isinstance(first, Sum) and all(isinstance(x, Sum) and x.pending and x.ratio == first.ratio for x in vectors):
        sums: Any = vectors
        return torch.add(torch.cat([p.x for p in sums]), torch.cat([p.error for p in sums]), alpha=first.ratio)
    return torch.cat([x.value() if isinstance(x, Sum) else x for x in vectors])


def _apart(vector: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(torch.split_with_sizes(vector, sizes))


def _first(values: Tensor, count: int) -> Tensor:
    return values if values.numel() == count else values[:count]


def few(batch: Sequence[B], size: Callable[[B], int]) -> Iterator[list[B]]:
    """As many at a time as what is made of them is small: of all, it could be as large as a model."""
    some: list[B] = []
    total = 0
    for one in batch:
        if some and total + size(one) > FEW:
            yield some
            some, total = [], 0
        some.append(one)
        total += size(one)
    if some:
        yield some
