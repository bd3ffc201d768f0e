"""gTop-k. Shi, Wang, Zhao, Tang, Wang, Tang, Chu 2019, arXiv 1901.04359, Algorithms 3 and 4.

    p_i = gradient + error;   T_i = the k largest entries of p_i, by magnitude
    up     in round j = 0, 1, ... worker r with r mod 2^(j+1) = 2^j sends T_r to worker s = r - 2^j, which keeps the
           k largest entries of the sum:   T_s = top_k(T_s + T_r)
    down   in the opposite order each T_0 / W is handed back: it is the mean on all workers

Any number of workers: one whose partner does not exist waits. Each message is k entries, and no worker sends more than
the root, ceil(log2 W) of them.

Departure: the paper returns to a worker those of its entries whose place is not in T_0, so one that a merge drops
while another branch carries its place to the root is lost. Here the way down also tells each worker, by a bit for each
entry of the T that it sent up, which of them are part of T_0. By its own merges it then knows the same of the entries
that these were made of: its first T, which is what it has sent, and those of its children, to whom it passes it on.
What did not arrive stays in the error of the worker that it came from, so sum_i sent_i = W mean, to the rounding of the
merges' additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.core.combine import error_feedback, whole
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import Exchange, Swap
from thinwire.core.value import Sparse, Sum
from thinwire.methods.topk import Entries, TopK, largest, narrow, widened


class Verdict(NamedTuple):
    """What comes down: the root's entries, and which of those that were sent up are in them."""

    values: Tensor  # (k,)
    indices: Tensor  # (k,)
    arrived: Tensor  # (ceil(k / 8),) uint8, a bit for each entry


@dataclass(frozen=True, slots=True, kw_only=True)
class GTopK(TopK):
    """The largest coordinates over all workers, merged along a tree, with error feedback: O(k log W) bytes.

    Bytes: (8 + 1/8) ratio d ceil(log2(W)), by the root, which sends the most
    Use: top-k with many workers: the bytes grow with log W.
    Avoid: networks with delay: 2 log2 W rounds, none of which starts before backward ends.
    """

    def method(self) -> Method:
        return whole(error_feedback(self))

    def reduce(self, x: Tensor | Sum, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        d, rank, world = x.numel(), ctx.rank, ctx.world
        first = T = largest(x, self.ratio)
        strides = [1 << j for j in range(max(1, (world - 1).bit_length()))]  # a round even for a worker alone
        parent = {s: rank - s for s in strides if rank % (2 * s) == s}
        child = {s: rank + s for s in strides if rank % (2 * s) == 0 and rank + s < world}

        merges = {}
        for s in strides:
            theirs = yield Swap(Entries(T.values, narrow(T.indices, d)), to=parent.get(s), source=child.get(s))
            if theirs is not None:
                merges[s] = Merge.of(T, Entries(theirs.values, widened(theirs.indices)))
                T = merges[s].kept

        arrived = torch.ones_like(T.indices, dtype=torch.bool)
        for s in reversed(strides):
            arrived, child_arrived = merges[s].origins(arrived) if s in merges else (arrived, arrived)
            verdict = Verdict(T.values, narrow(T.indices, d), _packed(child_arrived))
            verdict = yield Swap(verdict, to=child.get(s), source=parent.get(s))
            if verdict is not None:
                T = Entries(verdict.values, widened(verdict.indices))
                arrived = _unpacked(verdict.arrived, len(T.values))
        sent = Sparse(first.indices, torch.where(arrived, first.values, 0))
        return Reduced(Sparse(T.indices, T.values / world), sent), state


class Merge(NamedTuple):
    """The k largest of the sum of two sets of k entries, and where they come from."""

    kept: Entries  # (k,)
    chosen: Tensor  # (k,) the places of those kept among both sets' entries, in order of their indices
    order: Tensor  # (2k,) that order
    second: Tensor  # (2k,) whether the one before has the same index, and the sum

    @classmethod
    def of(cls, a: Entries, b: Entries) -> Merge:
        indices, order = torch.cat([a.indices, b.indices]).sort(stable=True)
        second = pad(indices[1:] == indices[:-1], (1, 0))
        values = torch.cat([a.values, b.values])[order]
        values[:-1] += torch.where(second[1:], values[1:], 0)
        size = torch.where(second, -1, values.abs())
        chosen = size.sort(descending=True, stable=True).indices[: len(a.values)].sort().values
        return cls(Entries(values[chosen], indices[chosen]), chosen, order, second)

    def origins(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Which entries of either set are in those of ``kept`` that are marked."""
        marked = torch.zeros_like(self.second).index_copy_(0, self.chosen, kept)
        marked[1:] |= self.second[1:] & marked[:-1]
        a, b = torch.empty_like(marked).index_copy_(0, self.order, marked).chunk(2)
        return a, b


def _packed(marks: Tensor) -> Tensor:
    octets = pad(marks, (0, -len(marks) % 8)).view(-1, 8)
    return (octets.to(torch.uint8) << _shifts(marks)).sum(-1, dtype=torch.uint8)


def _unpacked(octets: Tensor, k: int) -> Tensor:
    return (octets.unsqueeze(-1) >> _shifts(octets) & 1).flatten()[:k].bool()


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
