"""W workers in one process and no network: what a method computes, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.bundle import Given, Start, start
from thinwire.core.lockstep import Collective, Lockstep, cut
from thinwire.core.method import Context, Method, State
from thinwire.core.value import made
from thinwire.registry import Recipe, resolve

Tensors = Mapping[str, Tensor]


class Simulation:
    """Runs a method for ``workers`` workers in lock-step.

    ``reduce`` takes one dict of tensors for each worker and gives one back for each: all equal,
    unless the method, as gossip's, answers each worker differently.
    """

    def __init__(self, method: str | Recipe | Method, workers: int, seed: int = 0) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.method = resolve(method)
        self.workers = workers
        self.seed = seed
        self.step = 0
        self.bytes_sent = 0
        """By rank 0 so far; no worker sends more."""
        self.states: list[dict[str, State]] = [{} for _ in range(workers)]
        self._like: dict[str, Tensor] = {}
        self._shapes: dict[str, Tensor] = {}
        self._last_lr: dict[str, float] = {}

    def reduce(self, inputs: Sequence[Tensors], lr: float | None = None) -> list[dict[str, Tensor]]:
        """One step. A name that a worker leaves out is a zero there; one that all leave out is not reduced.

        To a method that takes the whole gradient, a name that it has seen before is always a part of it.
        """
        if len(inputs) != self.workers:
            raise ValueError(f"{self.workers} workers need as many dicts, not {len(inputs)}")
        shapes = {name: x for tensors in inputs for name, x in tensors.items()}
        if self.method.whole:
            shapes = self._shapes | shapes
        full = [{name: t.get(name, torch.zeros_like(x)) for name, x in shapes.items()} for t in inputs]
        parts = [{"": _joined(t)} for t in full] if self.method.whole else full
        names = [name for name, x in parts[0].items() if x.numel()]
        starts = [self._start(rank, {n: parts[rank][n] for n in names}, lr) for rank in range(self.workers)]
        locksteps: list[Lockstep[Any]] = [Lockstep(begun.exchanges) for begun in starts]

        rounds = [lockstep.advance() for lockstep in locksteps]
        while rounds[0]:
            self.bytes_sent += sum(c.bytes_sent(self.workers) for c in rounds[0])
            answers = _communicate(rounds)
            rounds = [lockstep.advance(a) for lockstep, a in zip(locksteps, answers, strict=True)]

        self.step += 1
        self._shapes.update(shapes)
        outs, last_lr = [], {}
        for rank, lockstep in enumerate(locksteps):
            results = dict(zip(names, starts[rank].outcomes(lockstep.results), strict=True))
            for name, (_, state) in results.items():
                if lr and state is not self.states[rank][name]:
                    last_lr[name] = lr
                self.states[rank][name] = state
            means = {n: made(results[n][0], x) if n in results else x.clone() for n, x in parts[rank].items()}
            means = _parted(means[""], shapes) if self.method.whole else means
            outs.append({name: mean.to(shapes[name].dtype) for name, mean in means.items()})
        self._last_lr |= last_lr
        return outs

    def owed(self) -> dict[str, Tensor]:
        """By name, the mean over workers of all that is withheld: the workers' errors and the server's."""
        owed = {}
        for name, x in self._like.items():
            parts = [self.method.withheld(x, s[name], self._context(r, name)) for r, s in enumerate(self.states)]
            owed[name] = torch.stack(parts).mean(0)
        return _parted(owed[""], self._shapes) if self.method.whole else owed

    def _start(self, rank: int, tensors: Tensors, lr: float | None) -> Start:
        parts = []
        for name, x in tensors.items():
            ctx = self._context(rank, name, lr, x.dtype)
            if name not in self.states[rank]:
                self._like[name] = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                self.states[rank][name] = self.method.init(self._like[name], ctx)
            parts.append(Given(x.clone(), self.states[rank][name], ctx))
        return start(self.method, parts)

    def _context(self, rank: int, name: str, lr: float | None = None, dtype: torch.dtype | None = None) -> Context:
        return Context(self.step, name, rank, self.workers, self.seed, lr, self._last_lr.get(name), dtype)


def _joined(tensors: Tensors) -> Tensor:
    return torch.cat([x.flatten() for x in tensors.values()])


def _parted(vector: Tensor, like: Tensors) -> dict[str, Tensor]:
    parts = torch.split(vector, [x.numel() for x in like.values()])
    return {name: part.view_as(x) for (name, x), part in zip(like.items(), parts, strict=True)}


def _communicate(rounds: Sequence[Sequence[Collective]]) -> list[list[Tensor]]:
    """Each worker's answers to a round, in which all workers issued the same collectives."""
    world = len(rounds)
    answers: list[list[Any]] = [[] for _ in rounds]
    for same in zip(*rounds, strict=True):
        if same[0].op == "swap":
            for rank, answer in enumerate(_delivered(same)):
                answers[rank].append(answer)
            continue
        assert len({(c.op, c.buffer.dtype, c.buffer.shape) for c in same}) == 1
        buffers = torch.stack([c.buffer for c in same])
        for rank in range(world):
            if same[0].op == "all_reduce":
                answers[rank].append((buffers * (1.0 / world)).sum(0))
            else:
                answers[rank].append(buffers if same[0].op == "all_gather" else buffers[:, rank])
    return answers


def _delivered(swaps: Sequence[Collective]) -> list[Tensor]:
    """Each worker's answer: what the others have sent it, all of which must be expected."""
    assert {c.op for c in swaps} == {"swap"}
    mail = {(rank, to): message for rank, c in enumerate(swaps) for to, message in cut(c.buffer, c.sends).items()}
    sizes = {(source, rank): size for rank, c in enumerate(swaps) for source, size in c.receives.items()}
    assert {ends: len(message) for ends, message in mail.items()} == sizes
    nothing = swaps[0].buffer[:0]
    return [torch.cat([nothing, *(mail[source, rank] for source in c.receives)]) for rank, c in enumerate(swaps)]
