"""One tensor's step as every driver runs it: in wide arithmetic, and with no trace of a step that went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import AllReduce, Exchange

WIDE = (torch.float32, torch.float64)


def exchange(
    method: Method,
    x: Tensor,
    state: Any,
    ctx: Context,
    present: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> Exchange[tuple[Tensor, State]]:
    """The mean and the state to keep.

    A mean that is not finite is handed on, and the state stays as it was: all workers see the same mean, so all agree.

    ``present`` says whether this worker has a gradient for ``x``, or for each of its parts of the given ``sizes``.
    Where no worker has one, the trainer drops the answer: it is zero there, and what was owed is still owed.
    """
    reduction = method.reduce(x if x.dtype in WIDE else x.float(), state, ctx)
    if present is None:
        out, new = yield from reduction
        absent = None
    else:
        (out, new), share = yield from _with_presence(reduction, present)
        absent = share == 0
    if not finite(out.mean):
        return out.mean, state
    if absent is None or not absent.any():
        return out.mean, new
    if sizes is None:
        return torch.zeros_like(x), state
    dropped = out.mean * absent.repeat_interleave(torch.tensor(sizes, device=x.device))
    return out.mean - dropped, method.refund(new, dropped)


def _with_presence(
    reduction: Exchange[tuple[Reduced, State]], present: Tensor
) -> Exchange[tuple[tuple[Reduced, State], Tensor]]:
    """The reduction with some numbers more in its first round: which share of the workers is present."""
    request = next(reduction)
    first = request if isinstance(request, tuple) else (request,)
    *answers, share = yield (*first, AllReduce(present.float()))
    reply: Any = tuple(answers) if isinstance(request, tuple) else answers[0]
    while True:
        try:
            reply = yield reduction.send(reply)
        except StopIteration as stop:
            return stop.value, share


def finite(t: Tensor) -> bool:
    """Whether all of ``t`` is finite."""
    # a finite sum has finite terms; the converse fails only on overflow, and is then looked at closely
    return t.is_meta or bool(t.sum().isfinite()) or bool(t.isfinite().all())
