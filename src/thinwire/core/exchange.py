"""One tensor's step as every driver runs it: in wide arithmetic, and with no trace of a step that went wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import AllReduce, Exchange

WIDE = (torch.float32, torch.float64)


def exchange(
    method: Method, x: Tensor, state: Any, ctx: Context, present: Tensor | None = None
) -> Exchange[tuple[Tensor, State]]:
    """The mean and the state to keep.

    A mean that is not finite is handed on, and the state stays as it was: all workers see the same mean, so all agree.
    ``present``, if given, says whether this worker has a gradient at all. If no worker has one, the trainer drops the
    answer, so the answer is zero and nothing of what is owed is spent.
    """
    reduction = method.reduce(x if x.dtype in WIDE else x.float(), state, ctx)
    if present is None:
        (out, new), anywhere = (yield from reduction), True
    else:
        (out, new), anywhere = yield from _with_presence(reduction, present)
    if not anywhere:
        return torch.zeros_like(x), state
    return out.mean, new if finite(out.mean) else state


def _with_presence(
    reduction: Exchange[tuple[Reduced, State]], present: Tensor
) -> Exchange[tuple[tuple[Reduced, State], bool]]:
    """The reduction, with one number more in its first round: whether any worker is present."""
    request = next(reduction)
    first = request if isinstance(request, tuple) else (request,)
    *answers, share = yield (*first, AllReduce(present.float().view(1)))
    reply: Any = tuple(answers) if isinstance(request, tuple) else answers[0]
    while True:
        try:
            reply = yield reduction.send(reply)
        except StopIteration as stop:
            return stop.value, bool(share.item())


def finite(t: Tensor) -> bool:
    """Whether all of ``t`` is finite."""
    # a finite sum has finite terms; the converse fails only on overflow, and is then looked at closely
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())
