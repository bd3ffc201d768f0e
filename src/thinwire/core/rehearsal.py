"""A method's step on a tiny tensor, for a worker alone: what is compiled or loaded once is so when training starts."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from thinwire.core.exchange import exchange
from thinwire.core.lockstep import Collective, Lockstep, drive
from thinwire.core.method import Context, Method
from thinwire.core.value import made, wide


def rehearse(method: Method, dtypes: Iterable[torch.dtype], device: torch.device) -> None:
    """For each type that gradients have.

    A method that cannot do this for reasons of its own will do what it does where training begins.
    """
    for dtype in dtypes:
        with suppress(Exception):
            _step_twice(method.bare(), torch.ones((256,) if method.whole else (16, 16), dtype=dtype, device=device))


def _step_twice(method: Method, x: Tensor) -> None:
    """Since methods may take turns."""
    state = method.init(wide(x), Context())
    for step in range(2):
        lockstep = Lockstep([exchange(method, x.clone(), state, Context(step, dtype=x.dtype))])
        drive(lockstep, _alone)
        mean, state = lockstep.results[0]
        made(mean, x)


def _alone(collective: Collective) -> Tensor:
    """What comes back where nobody else is."""
    return collective.buffer[None] if collective.op == "all_gather" else collective.buffer
