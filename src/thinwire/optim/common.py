"""What the optimizers that own their exchange share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thinwire.core.combine import Local
from thinwire.core.method import Averager, Method, Workers
from thinwire.registry import Recipe, resolve


def exchange_of(exchange: str | Recipe | Method) -> Method:
    """The method that an optimizer exchanges by; the momentum is the optimizer's own."""
    method = resolve(exchange)
    if isinstance(method, Local):
        raise ValueError(f"the exchange must have no momentum or clipping of its own: {method!r}")
    return method


def check_at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, not {value}")


def check_same_in_all_groups(optimizer: torch.optim.Optimizer, name: str) -> None:
    """What the hook uses is one for all parameters."""
    if any(group[name] != optimizer.defaults[name] for group in optimizer.param_groups):
        raise ValueError(f"{name} must be the same in all parameter groups")


def check_attached(optimizer: Any) -> None:
    if not optimizer.attached:
        kind = type(optimizer).__name__
        raise RuntimeError(f"{kind} exchanges its momentum itself: call thinwire.attach(model, optimizer) first")


def workers_of(optimizer: Averager) -> Workers:
    """The workers that an attached optimizer averages with."""
    if optimizer.workers is None:
        kind = type(optimizer).__name__
        raise RuntimeError(f"{kind} averages over the workers itself: call thinwire.attach(model, optimizer) first")
    return optimizer.workers


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """What ``step(closure)`` returns."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
