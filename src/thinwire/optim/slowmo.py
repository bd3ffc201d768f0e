"""SlowMo. Wang, Tantia, Ballas, Rabbat 2019, arXiv 1910.00643. Local SGD: Stich 2018, arXiv 1805.09767.

    each worker takes tau steps of its base optimizer, from x_0 to x_i, with no communication or by gossip; then
    u = beta u + (x_0 - mean_i x_i) / gamma;    x_0 -= alpha gamma u;    all go on from x_0

gamma is the base's learning rate. beta = 0 and alpha = 1 is local SGD: x_0 = mean_i x_i.

Departure: what is averaged is x_0 - x_i, so that any method with error feedback can do it. gamma is the mean of the
period's rates, which a schedule may change. A period at a rate of 0 leaves u as it was. The base's momenta start each
period afresh by default: kept, they and the slow momentum push the same way twice. Where the base is ``Gossip``, the
last step of a period is not mixed: the average that follows has the same mean without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.method import Method, Workers
from thinwire.core.value import finite
from thinwire.optim.common import check_at_least_zero, exchange_of, workers_of
from thinwire.optim.gossip import Gossip
from thinwire.registry import Recipe

Buffers = Literal["keep", "reset", "average"]


class SlowMo(Optimizer):
    """Local steps of any optimizer, then an average of the parameters with a slow momentum.

    base: What each worker steps by, on its own gradients; on the command line its options may be given too.
    period: Steps from one average to the next.
    slow_momentum: Of the averages' differences.
    slow_lr: Share of the slow update that is applied.
    buffers: What becomes of the base's momenta at an average: keep, reset or average, uncompressed.
    exchange: The method that the differences are averaged by; on the command line, slowmo+method.

    Bytes: 8 d (W-1)/W / period, by the default exchange; a base that gossips adds its own
    Use: networks so slow or so distant that even a small exchange at every step waits too long; with +method both
        savings multiply.
    Avoid: few steps, or workers whose data differ much: they drift apart between averages.
    """

    workers: Workers | None = None
    nesterov = False

    def __init__(
        self,
        base: Optimizer,
        period: int = 12,
        slow_momentum: float = 0.5,
        slow_lr: float = 1.0,
        buffers: Buffers = "reset",
        exchange: str | Recipe | Method = "dense",
    ) -> None:
        if type(period) is not int or period < 1:
            raise ValueError(f"period must be at least 1, not {period!r}")
        if not 0 <= slow_momentum < 1:
            raise ValueError(f"slow_momentum must be in [0, 1), not {slow_momentum}")
        check_at_least_zero(slow_lr=slow_lr)
        if buffers not in get_args(Buffers):
            raise ValueError(f"buffers must be one of {', '.join(get_args(Buffers))}, not {buffers!r}")
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.param_groups = base.param_groups  # a schedule that changes the one changes the other
        self.period = period
        self.method = exchange_of(exchange)
        self._slow_momentum = slow_momentum
        self._slow_lr = slow_lr
        self._buffers = buffers

    def __repr__(self) -> str:
        options = f"period={self.period}, slow_momentum={self._slow_momentum}, slow_lr={self._slow_lr}"
        base = repr(self.base) if isinstance(self.base, Gossip) else type(self.base).__name__
        return f"{type(self).__name__}({base}, {options}, buffers={self._buffers!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        workers = workers_of(self)
        for p in self._parameters():
            if "anchor" not in self.state[p]:
                self.state[p]["anchor"] = p.clone()
        gossip = self.base if isinstance(self.base, Gossip) else None
        loss = (gossip.base if gossip else self.base).step(closure)
        for group in self.param_groups:
            group["local_steps"] = group.get("local_steps", 0) + 1
            group["rates"] = group.get("rates", 0.0) + float(group["lr"])
        if self.param_groups[0]["local_steps"] >= self.period:
            self.meet()
        elif gossip:
            gossip.mix(workers)
        else:
            workers.skip()
        return loss

    @torch.no_grad()
    def meet(self) -> None:
        """Average now, before the period is over: at the end of training, say."""
        if not self.param_groups[0].get("local_steps"):
            return
        differences = {p: self.state[p]["anchor"] - p for p in self._parameters()}
        means = workers_of(self).average(differences, self._averaged_buffers())
        for group in self.param_groups:
            gamma = self._gamma(group)
            for p in group["params"]:
                anchor = self.state[p]["anchor"]
                p.copy_(anchor.sub_(self._update(p, means[p], gamma), alpha=self._slow_lr))
            group |= {"local_steps": 0, "rates": 0.0}
        if self._buffers == "reset":
            self.base.state.clear()

    def _gamma(self, group: dict[str, Any]) -> float:
        return float(group["rates"]) / int(group["local_steps"])

    def _update(self, p: Tensor, difference: Tensor, gamma: float) -> Tensor:
        """gamma u, with no division by a gamma of 0."""
        beta = self._slow_momentum
        if not beta:
            return difference
        wide = torch.promote_types(p.dtype, torch.float32)
        u = self.state[p].setdefault("slow_momentum", torch.zeros_like(p, dtype=wide))
        if not (gamma and finite(difference)):
            return difference  # which spoils x, as with any optimizer, but u stays clean
        u.mul_(beta).add_(difference, alpha=1 / gamma)
        return u * gamma if not self.nesterov else torch.add(difference, u, alpha=beta * gamma)

    def _averaged_buffers(self) -> list[Tensor]:
        """The base's buffers, alike on all workers: where one has none yet, for want of a gradient, zeros."""
        if self._buffers != "average":
            return []
        shaped = {
            p: {k: v for k, v in self.base.state.get(p, {}).items() if isinstance(v, Tensor) and v.shape == p.shape}
            for p in self._parameters()
        }
        names = sorted({name for buffers in shaped.values() for name in buffers if name != "step"})
        return [own[name] if name in own else torch.zeros_like(p) for p, own in shaped.items() for name in names]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Of the base, and of the slow part in the order of the parameters."""
        return {"base": self.base.state_dict(), "slow": [dict(self.state[p]) for p in self._parameters()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups
        for p, saved in zip(self._parameters(), state_dict["slow"], strict=True):
            self.state[p] = {name: tensor.to(p.device, copy=True) for name, tensor in saved.items()}


class LocalSGD(SlowMo):
    """Local steps of any optimizer, then the plain average of the parameters.

    base: What each worker steps by, on its own gradients; on the command line its options may be given too.
    period: Steps from one average to the next.
    buffers: What becomes of the base's momenta at an average: keep, reset or average, uncompressed.
    exchange: The method that the differences are averaged by; on the command line, local-sgd+method.

    Bytes: 8 d (W-1)/W / period, by the default exchange
    Use: the simplest of the local methods, and their baseline.
    Avoid: long periods, where ``slowmo`` loses less.
    """

    def __init__(
        self,
        base: Optimizer,
        period: int = 12,
        buffers: Buffers = "keep",
        exchange: str | Recipe | Method = "dense",
    ) -> None:
        super().__init__(base, period, 0.0, 1.0, buffers, exchange)
