"""Top-k SGD with error feedback. Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599; Aji, Heafield 2017, arXiv 1704.05021.

    p_i = gradient + error;   S_i = the places of the k largest |p_i|
    out = mean_i p_i[S_i];    e_i = p_i with S_i zeroed

Every worker gathers everybody's values and places, so the bytes grow with the number of workers.

Departure: k is a share of each tensor rather than of the gradient, so that a tensor leaves before the rest is there.
Of equal magnitudes the first in the tensor are taken. A tensor that would not save half of its bytes goes dense: with
many workers, that is all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.combine import Rule, error_feedback, where
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import AllGather, Exchange
from thinwire.core.value import Sparse, Sum


class Entries(NamedTuple):
    """Some numbers of a vector and where they stand."""

    values: Tensor  # (..., k)
    indices: Tensor  # (..., k), as ``narrow`` makes them where they travel


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Method):
    """The largest coordinates of each worker with error feedback: one all-gather.

    Bytes: 8 ratio d (W-1), or 6 ratio d (W-1) in tensors of at most 65536 numbers
    Use: few workers and gradients with few large numbers, such as those of embeddings.
    Avoid: many workers, since the bytes grow with W: ``gtopk``, or ``randk``. Momentum after it hurts: ``dgc``.
    """

    adds: ClassVar[bool] = True
    ratio: float = 0.01
    """Share of the coordinates that is sent."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], not {self.ratio}")

    def method(self) -> Method:
        return where(Rule(), error_feedback(self))

    def reduce(self, x: Tensor | Sum, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        mine = largest(x, self.ratio)
        values, indices = yield AllGather(Entries(mine.values, narrow(mine.indices, x.numel())))
        mean = Sparse(widened(indices), values / len(values))
        return Reduced(mean, sent=Sparse(mine.indices, mine.values)), state


def largest(x: Tensor | Sum, ratio: float) -> Entries:
    """The share of ``x`` with the largest magnitudes, by their places in the flattened tensor, in rising order."""
    return Entries(*kernels.top_k(x.flatten(), share(ratio, x.numel())))


def share(ratio: float, d: int) -> int:
    return max(1, ceil(ratio * d))


def narrow(indices: Tensor, d: int) -> Tensor:
    """Indices below ``d`` as unsigned numbers of one, two or four bytes."""
    assert d <= 1 << 32
    return indices.to(torch.uint8 if d <= 1 << 8 else torch.int16 if d <= 1 << 16 else torch.int32)


def widened(indices: Tensor) -> Tensor:
    """The inverse of ``narrow``: the bits of the narrow type, without a sign."""
    return indices.long() & ((1 << 8 * indices.element_size()) - 1)
