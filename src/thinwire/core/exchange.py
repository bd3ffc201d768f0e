"""One tensor's step as every driver runs it: in wide arithmetic, and with no trace of a step that went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.core.method import Context, Method, State
from thinwire.core.requests import AllReduce, Batched, Exchange
from thinwire.core.value import WIDE, Value, finite, made

R = TypeVar("R")


def exchange(
    method: Method,
    x: Tensor,
    state: Any,
    ctx: Context,
    present: Tensor | None = None,
    sizes: Sequence[int] | None = None,
) -> Exchange[tuple[Value, State]]:
    """The mean and the state to keep.

    A mean that is not finite is handed on, and the state stays as it was: all workers see the same mean, so all agree.

    ``present`` says whether this worker has a gradient for ``x``, or for each of its parts of the given ``sizes``.
    Where no worker has one, the trainer drops the answer: it is zero there, and what was owed is still owed.
    """
    reduction = method.reduce(x if x.dtype in WIDE or method.widens else x.float(), state, ctx)
    if present is None:
        out, new = yield from reduction
        if new is state:  # nothing to protect: looking at a dense mean would be a pass over all of it
            return out.mean, state
        absent = None
    else:
        request = next(reduction)
        while isinstance(request, Batched):
            request = reduction.send((yield request))
        first = request if isinstance(request, tuple) else (request,)
        *answers, share = yield (*first, AllReduce(present.float()))
        absent = share == 0
        if absent.all():
            return torch.zeros_like(x), state
        out, new = yield from _resumed(reduction, tuple(answers) if isinstance(request, tuple) else answers[0])
    if not finite(out.mean):
        return out.mean, state
    if absent is None or not absent.any():
        return out.mean, new
    mean = made(out.mean, x)
    dropped = mean * absent.repeat_interleave(torch.tensor(sizes, device=x.device))
    return mean - dropped, method.refund(new, dropped)


def _resumed(reduction: Exchange[R], reply: Any) -> Exchange[R]:
    """The rest of a reduction whose first request is answered by ``reply``."""
    while True:
        try:
            request = reduction.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        reply = yield request
