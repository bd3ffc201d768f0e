"""One tensor's step as every driver runs it: in wide arithmetic, and with no trace of a step that went wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.core.method import Context, Method, Reduced, State
from thinwire.core.requests import AllReduce, Exchange

WIDE = (torch.float32, torch.float64)


def exchange(
    method: Method, x: Tensor, state: Any, ctx: Context, may_be_absent: bool = False
) -> Exchange[tuple[Tensor, State]]:
    """The mean and the state to keep.

    A mean that is not finite is handed on, and the state stays as it was: all workers see the same mean, so all agree.
    ``may_be_absent`` asks whether any worker has a gradient at all. If none has, the trainer drops the answer, so the
    answer is zero and nothing of what is owed is spent.
    """
    wide = x if x.dtype in WIDE else x.float()
    reduction = method.reduce(wide, state, ctx)
    present = True
    if may_be_absent:
        (out, new), present = yield from _with_presence(reduction, wide)
    else:
        out, new = yield from reduction
    if not present:
        return torch.zeros_like(x), state
    return out.mean, new if _finite(out.mean) else state


def _with_presence(
    reduction: Exchange[tuple[Reduced, State]], x: Tensor
) -> Exchange[tuple[tuple[Reduced, State], bool]]:
    """The reduction, with one number more in its first round: whether any worker's x is not zero."""
    flag = AllReduce(x.any().to(x.dtype).view(1))
    first = next(reduction)
    *answers, present = yield (*(first if isinstance(first, tuple) else (first,)), flag)
    reply: Any = tuple(answers) if isinstance(first, tuple) else answers[0]
    while True:
        try:
            reply = yield reduction.send(reply)
        except StopIteration as stop:
            return stop.value, bool(present.item())


def _finite(t: Tensor) -> bool:
    # a finite sum has finite terms; the converse fails only on overflow, and is then looked at closely
    return bool(t.sum().isfinite()) or bool(t.isfinite().all())
