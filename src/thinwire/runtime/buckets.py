"""Gradients that travel together, as DDP cuts them, and what an optimizer averages, cut alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    """What DDP hands over, with names in place of indices."""

    number: int
    parts: list[Part]
    buffer: Tensor
    last: bool


def packed(parts: Sequence[Part]) -> list[Bucket]:
    """Tensors copied end to end; several buckets, so that one is compressed while another travels."""
    cut: list[list[Part]] = []
    for part in parts:
        full = cut and sum(p.grad.nbytes for p in cut[-1]) + part.grad.nbytes > SIZE
        if not cut or full or cut[-1][0].grad.dtype != part.grad.dtype:
            cut.append([])
        cut[-1].append(part)
    buckets = []
    for number, group in enumerate(cut):
        buffer = torch.cat([part.grad.flatten() for part in group])
        views = torch.split(buffer, [part.grad.numel() for part in group])
        copied = [part._replace(grad=view.view_as(part.grad)) for part, view in zip(group, views, strict=True)]
        buckets.append(Bucket(number, copied, buffer, last=number == len(cut) - 1))
    return buckets
