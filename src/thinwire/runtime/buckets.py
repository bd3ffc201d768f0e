"""Gradients that are handed over together, as DDP cuts them or alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

SIZE = 25 << 20
"""Bytes after which tensors that an optimizer averages go into another bucket, as DDP's do."""


class Part(NamedTuple):
    """One parameter's gradient in a bucket."""

    name: str
    parameter: Tensor
    grad: Tensor


class Bucket(NamedTuple):
    """Some of a step's gradients."""

    number: int
    parts: list[Part]
    memory: list[Tensor]
    """One buffer that holds them end to end, or each by itself."""
    last: bool
    closes: bool | None = None
    """Whether a message ends with it; None where the engine is to join buckets as it sees fit."""


T = TypeVar("T")


def grouped(items: Iterable[T], tensor: Callable[[T], Tensor], sizes: Iterator[int]) -> list[list[T]]:
    """In their order: as many of a type as have the next of ``sizes`` in bytes, but at least one."""
    groups: list[list[T]] = []
    left, dtype = 0, None
    for item in items:
        x = tensor(item)
        if x.dtype != dtype or x.nbytes > left:
            groups.append([])
            left, dtype = next(sizes), x.dtype
        groups[-1].append(item)
        left -= x.nbytes
    return groups


def packed(parts: Sequence[Part]) -> list[Bucket]:
    """Tensors copied end to end; several buckets, so that one is compressed while another travels."""
    cut = grouped(parts, lambda part: part.grad, repeat(SIZE))
    buckets = []
    for number, group in enumerate(cut):
        buffer = torch.cat([part.grad.flatten() for part in group])
        views = torch.split(buffer, [part.grad.numel() for part in group])
        copied = [part._replace(grad=view.view_as(part.grad)) for part, view in zip(group, views, strict=True)]
        buckets.append(Bucket(number, copied, [buffer], last=number == len(cut) - 1))
    return buckets
