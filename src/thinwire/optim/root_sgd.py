"""ROOT-SGD. Li, Mou, Wainwright, Jordan 2020, arXiv 2008.12690.

    v_t = g(x_{t-1}; z_t) + (1 - 1/t) (v_{t-1} - g(x_{t-2}; z_t));    x_t = x_{t-1} - lr v_t

with both gradients from the same sample z_t. During the burn-in x stays at x_0, and v is the mean gradient there.
Several epochs: t starts again from 1, where x then is. A single one keeps the noise of its first gradients with a
weight of 1/t, which from a far start, where gradients are noisy, is the largest part of its error.

The workers average  t g(x_{t-1}) - (t-1) g(x_{t-2}),  one tensor a step:  t v_t = (t-1) v_{t-1} + that mean. In these
units the steps simply add up, so what error feedback withholds at one step is worth the same at a later one.

Departure: ``clip`` limits the step and not the estimator, which a clipped gradient would bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.method import Method, Workers
from thinwire.core.value import finite
from thinwire.optim.common import check_at_least_zero, evaluate, exchange_of, workers_of
from thinwire.registry import Recipe


class RootSGD(Optimizer):
    """SGD on a recursive average of all gradients so far; two gradients of one batch a step, so it needs a closure.

    burn_in: Steps at the start of an epoch that only average the gradient there.
    epochs: Short epochs before the last, which has no end; each forgets where it came from.
    epoch: Steps of a short epoch, about 1 / (lr x least curvature).
    clip: Largest norm of the averaged gradient that a step follows. 0 for none.
    exchange: The method that the gradients' differences are averaged by; on the command line, root-sgd+method.

    Bytes: 8 d (W-1)/W, by the default exchange
    Use: convex problems whose curvature changes within the reach of the noise, such as a rare class: its last iterate
        meets the Cramer-Rao bound at a constant rate, where a mean of SGD's iterates is biased.
    Avoid: where computing is what training waits for: two gradients a step. Where the loss is nearly a parabola, or the
        samples are so many that SGD's rate may fall, a mean of SGD's iterates is as good with half the gradients.
    """

    workers: Workers | None = None
    needs_closure = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        burn_in: int = 10,
        epochs: int = 0,
        epoch: int = 100,
        clip: float = 0.0,
        exchange: str | Recipe | Method = "dense",
    ) -> None:
        check_at_least_zero(lr=lr, clip=clip)
        if type(burn_in) is not int or burn_in < 1:
            raise ValueError(f"burn_in must be at least 1, not {burn_in!r}")
        if type(epochs) is not int or epochs < 0:
            raise ValueError(f"epochs must be at least 0, not {epochs!r}")
        if type(epoch) is not int or epoch < (burn_in if epochs else 1):
            raise ValueError(f"epoch must be at least the burn_in, not {epoch!r}")
        super().__init__(params, {"lr": lr, "step": 0})
        self.method = exchange_of(exchange)
        self._burn_in = burn_in
        self._epochs = epochs
        self._epoch = epoch
        self._clip = clip

    def __repr__(self) -> str:
        epochs = f"epochs={self._epochs}, epoch={self._epoch}"
        return f"RootSGD(burn_in={self._burn_in}, {epochs}, clip={self._clip})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """``closure`` clears the gradients, evaluates one batch, always the same, and calls backward."""
        if closure is None:
            raise ValueError("RootSGD evaluates its loss twice a step: call step(closure)")
        workers = workers_of(self)
        steps = self.param_groups[0]["step"]
        t = steps - self._epoch * min(self._epochs, steps // self._epoch) + 1
        old = self._old_gradients(closure, workers) if t > self._burn_in else None
        loss = evaluate(closure)
        new = self._gradients()
        outgoing = {p: g * t - (g if old is None else old[p]) * (t - 1) for p, g in new.items()}
        for p, mean in workers.average(outgoing).items():
            self._average(p, mean, t)
        if t >= self._burn_in:
            self._move()
        self.param_groups[0]["step"] = steps + 1
        return loss

    def _old_gradients(self, closure: Callable[[], Any], workers: Workers) -> dict[Tensor, Tensor]:
        """The gradients at x_{t-2}, leaving no trace: the evaluation at x_{t-1} draws and sees the same."""
        with _replayed(self._parameters(), workers.buffers()):
            for p in self._parameters():
                p.copy_(self.state[p]["previous"])
            evaluate(closure)
            return {p: g.clone() for p, g in self._gradients().items()}

    def _gradients(self) -> dict[Tensor, Tensor]:
        return {p: torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters()}

    def _average(self, p: Tensor, mean: Tensor, t: int) -> None:
        state = self.state[p]
        if "v" not in state:
            state["v"] = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        if finite(mean):
            state["v"].mul_((t - 1) / t).add_(mean, alpha=1 / t)
        else:
            p.add_(mean)  # spoils x, as with any optimizer, but v stays clean

    def _move(self) -> None:
        norm = math.hypot(*(self.state[p]["v"].norm().item() for p in self._parameters())) if self._clip else 0.0
        scale = min(1.0, self._clip / norm) if norm else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["previous"] = p.clone()
                p.sub_(self.state[p]["v"], alpha=group["lr"] * scale)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


@contextmanager
def _replayed(parameters: list[Tensor], buffers: list[Tensor]) -> Iterator[None]:
    """Afterwards parameters, buffers and random numbers are where they were."""
    tensors = [*parameters, *buffers]
    kept = [tensor.clone() for tensor in tensors]
    try:
        with torch.random.fork_rng(devices=sorted({p.device.index for p in parameters if p.is_cuda})):
            yield
    finally:
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)
