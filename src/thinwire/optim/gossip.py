"""Gossip. D-PSGD: Lian, Zhang, Zhang, Hsieh, Zhang, Liu 2017, arXiv 1705.09056, Algorithm 1, on a ring. SGP: Assran,
Loizou, Ballas, Rabbat 2019, arXiv 1811.10792, Algorithm 1, on the exponential graph with one peer at a time.

    y_i = x_i - lr g_i(x_i)                         a step of the base optimizer, whose momenta stay on the worker
    x_i = (y_i + sum_h y_{i-h}) / (1 + n)           a mixing with n neighbours, at step k:
    ring           h = 1 and -1
    exponential    h = 2^(k mod L),  L = ceil(log2 W)

A mixing is the mean of 1 + n permutations of the workers, so its matrix has rows and columns that sum to 1 whatever W
is. The mean over workers stays; and SGP's push-sum weights, which are mixed alike, stay at the 1 that they start from,
so there is nothing to divide by. All mixings have the same eigenvectors, exp(2 pi i j m / W); what the workers disagree
by shrinks by the largest eigenvalue of m = 1 .. W-1: |1 + 2 cos(2 pi m / W)| / 3 a step on a ring of three and more;
|sin(2^L pi m / W)| / (2^L |sin(pi m / W)|) in L steps of the exponential graph, which is 0 if W is a power of 2.

A worker's bad number reaches its neighbours with its parameters, as an average of gradients would carry it to all.
Nothing is kept here that could hold it.

Departure: D-PSGD takes the gradient before the mixing, and adds the step after it. Here, as in SGP, the step is mixed
too, so that the next gradient is taken where the workers have just come nearer. With two workers this is S-SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.method import Averager, Context, Method, Owner, Reduced, State, Workers
from thinwire.core.requests import Exchange, Swap
from thinwire.optim.common import workers_of

Topology = Literal["ring", "exponential"]


class Own(NamedTuple):
    """What a worker tells its neighbours."""

    x: Tensor


@dataclass(frozen=True, slots=True)
class Mixing(Method):
    """The mean of a worker's tensor and its neighbours'; every worker's answer is its own."""

    topology: Topology

    def hops(self, step: int, world: int) -> list[int]:
        """How many places on those are that a worker sends to: others than itself, and none twice."""
        if self.topology == "ring":
            return [1, -1][: world - 1]
        rounds = (world - 1).bit_length()
        return [1 << step % rounds] if rounds else []

    def reduce(self, x: Tensor, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        own = Own(x.to(ctx.dtype) if ctx.dtype else x)
        ends = [((ctx.rank + h) % ctx.world, (ctx.rank - h) % ctx.world) for h in self.hops(ctx.step, ctx.world)]
        tensors = {ctx.rank: x}
        if ends:
            answers = yield tuple(Swap(own, to, source) for to, source in ends)
            theirs = answers if len(ends) > 1 else (answers,)
            tensors |= {source: answer.x for (_, source), answer in zip(ends, theirs, strict=True)}
        # in order of rank: where all are neighbours, all get the same bits
        total = reduce(torch.add, (tensors[rank].to(x.dtype) for rank in sorted(tensors)))
        return Reduced(total / len(tensors), sent=x), state


class Gossip(Optimizer):
    """Steps of any optimizer, each followed by an average of the parameters with those of the neighbours only.

    base: What each worker steps by, on its own gradients; on the command line its options may be given too.
    topology: Neighbours: ring, both sides at every step; exponential, one at a time, 1, 2, 4 ... places on.

    Bytes: 8 d, on a ring of three and more; 4 d on the exponential graph
    Use: many workers on networks with delay, or with one slow link: nobody waits for more than its neighbours.
    Avoid: thin links: it sends as much as an all-reduce, or more. Compress, or take local steps, instead.
    """

    workers: Workers | None = None

    def __init__(self, base: Optimizer, topology: Topology = "ring") -> None:
        if topology not in get_args(Topology):
            raise ValueError(f"topology must be one of {', '.join(get_args(Topology))}, not {topology!r}")
        if isinstance(base, Averager | Owner):
            raise ValueError(f"base must step by itself: {type(base).__name__} has an exchange of its own")
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.method: Method = Mixing(topology)
        self._topology = topology
        self._share()

    def __repr__(self) -> str:
        return f"Gossip({type(self.base).__name__}, topology={self._topology!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        workers = workers_of(self)
        loss = self.base.step(closure)
        self.mix(workers)
        return loss

    def mix(self, workers: Workers) -> None:
        """Average with the neighbours."""
        for p, mixed in workers.average({p: p for p in self._parameters()}, method=self.method).items():
            p.copy_(mixed)

    @torch.no_grad()
    def meet(self) -> None:
        """Average over all workers, exactly: at the end of training, or before the model is evaluated."""
        workers_of(self).average({}, exact=self._parameters())

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _share(self) -> None:
        """One state and one list of groups: a schedule that changes the one's rate changes the other's."""
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def state_dict(self) -> dict[str, Any]:
        """The base's."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.base.load_state_dict(dict(state_dict))
        self._share()
