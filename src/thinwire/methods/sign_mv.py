"""Sign-SGD with majority vote. Bernstein et al. 2018, arXiv 1802.04434 and 1810.05291, Algorithm 1 (Signum).

    worker i   m_i = mu m_i + (1 - mu) g_i;   push sign(m_i)
    server     V = sign(sum_i sign(m_i));     pull V
    out = V, which is +1 or -1

One bit each way, 2(W-1)/W d/8 bytes: rank j counts the votes on chunk j of every tensor. There is neither a scale nor
an error: the learning rate is the size of every coordinate's step. The published counter-examples, on which it does not
converge, are mended by error feedback (``ef-sign``, ``dist-ef``).

Departure: a bit cannot say zero. A zero, and a tie of an even number of workers, count as + and - in turn, by place and
step: always + would let every unused row of an embedding drift. One more bit in each chunk says that a worker's numbers
were not all finite, which signs would hide; the output is then NaN everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire import kernels
from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.momentum import running_mean
from thinwire.core.requests import AllGather, AllToAll, Exchange
from thinwire.core.value import Sum, finite, settled


class Ballot(NamedTuple):
    bits: Tensor  # (chunks, ceil((columns + 1) / 8)) uint8


@dataclass(frozen=True, slots=True)
class Signs:
    """+1 or -1 for each bit, in the shape of the memory that it is written to."""

    bits: Tensor
    columns: int

    def write(self, out: Tensor) -> None:
        codes = self._codes()
        out.copy_(codes[:, :-1].flatten()[: out.numel()].view_as(out)).mul_(2).sub_(1)
        if codes[:, -1].any():
            out.fill_(torch.nan)

    def subtract(self, p: Tensor | Sum, out: Tensor) -> None:
        p = settled(p)
        signs = torch.empty_like(p)
        self.write(signs)
        torch.sub(p, signs, out=out)

    def finite(self) -> bool:
        return self.bits.is_meta or not self._codes()[:, -1].any()

    def _codes(self) -> Tensor:
        return kernels.unpack_bits(self.bits, 1, self.columns + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignMV(Method):
    """Two-way 1-bit by majority vote, without error feedback; the output is +1 or -1, for a learning rate to match.

    Bytes: (W-1)/W d/4
    Use: where 1 bit without any state for errors is wanted, at the rates of Adam.
    Avoid: workers whose data differ: a majority finds a median. ``dist-ef-block`` sends as little and keeps the errors.
    """

    momentum: float = 0.9
    """Of each worker, before its vote; the optimizer's own is then 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")

    def keeps(self, x: Tensor, ctx: Context) -> bool:
        return True

    def method(self) -> Method:
        return running_mean(self.momentum, self)

    def reduce(self, x: Tensor, state: State, ctx: Context) -> Exchange[tuple[Reduced, State]]:
        W, d = ctx.world, x.numel()
        columns = -(-d // W)
        turns = x.new_zeros(W * columns, dtype=torch.uint8)
        turns[ctx.step % 2 :: 2] = 1

        votes = torch.where(x.flatten() == 0, turns[:d], x.flatten() > 0)
        bad = x.new_full((W, 1), not finite(x), dtype=torch.uint8)
        pushed = _ballot(pad(votes, (0, W * columns - d)).view(W, columns), bad)
        received = yield AllToAll(Ballot(pushed))

        count = kernels.unpack_bits(received.bits, 1, columns + 1).sum(0, keepdim=True, dtype=torch.int32)
        ayes, bad = count[:, :-1], count[:, -1:] > 0
        majority = torch.where(2 * ayes == W, turns.view(W, columns)[ctx.rank], 2 * ayes > W)
        pulled = yield AllGather(Ballot(_ballot(majority, bad)[0]))
        return Reduced(Signs(pulled.bits, columns), sent=Signs(pushed, columns)), state


def _ballot(votes: Tensor, bad: Tensor) -> Tensor:
    return kernels.pack_bits(torch.cat([votes, bad], 1).to(torch.uint8), 1)
