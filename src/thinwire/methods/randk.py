"""Random-k with error feedback. Stich, Cordonnier, Jaggi 2018, arXiv 1809.07599.

    p_i = gradient + error;   S = k places, drawn alike on all workers
    out = mean_i p_i[S];      e_i = p_i with S zeroed

The workers agree on S by their seed, so values alone travel, and they can be summed on the way.

Departure: S is one place from each of k equal stretches of the tensor, taken as a ring that is cut anew at each step.
Every place still has the chance k/d, on which alone the paper's E|p - p[S]|^2 = (1 - k/d) |p|^2 rests; the draw costs
k numbers rather than d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.core.combine import Rule, error_feedback, where
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import AllReduce, Exchange
from thinwire.core.value import Sparse
from thinwire.methods.topk import share


@dataclass(frozen=True, slots=True, kw_only=True)
class RandK(Method):
    """Random coordinates, the same on every worker, with error feedback: one all-reduce.

    Bytes: 8 ratio d (W-1)/W
    Use: many workers: it sums on the way, and choosing costs next to nothing.
    Avoid: short runs: a number waits 1/ratio steps for its turn on average.
    """

    ratio: float = 0.01
    """Share of the coordinates that is sent."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be in (0, 1], not {self.ratio}")

    def method(self) -> Method:
        return where(Rule(), error_feedback(self))

    def reduce(self, x: Tensor, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        indices = chosen(x, share(self.ratio, x.numel()), ctx)
        local = x.flatten()[indices]
        mean = yield AllReduce(local)
        return Reduced(Sparse(indices, mean), sent=Sparse(indices, local)), state


def chosen(x: Tensor, k: int, ctx: Context) -> Tensor:
    """k different places of ``x``, in the step's random order alike on all workers."""
    d = x.numel()
    borders = torch.arange(k + 1, device=x.device) * d // k
    drawn = ctx.rand(k + 1, like=x)
    inside = borders[:-1] + (drawn[1:] * borders.diff()).long()
    return (inside + (drawn[0] * d).long()) % d
