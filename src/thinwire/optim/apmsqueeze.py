"""APMSqueeze. Tang et al. 2020, arXiv 2008.11343; later 1-bit Adam, arXiv 2102.02888.

    warm-up   g = mean_i g_i;   m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2;   x -= lr (m / (sqrt v + eps) + wd x)
    then v is frozen, and the hook exchanges the momentum in place of the gradient:
              m_i = b1 m + (1-b1) g_i;   m = compressed mean_i m_i, with errors;   x -= lr (m / (sqrt v + eps) + wd x)

``warmup_steps="auto"`` ends the warm-up when |v_t|_1 / |v_{t-D}|_1 >= 0.96, D = 1 / (1 - b2), once lr no longer rises.

Departure: m and v are corrected for their start from zero, as in Adam itself and unlike the paper, unless
``bias_correction=False``: a v frozen before 1 / (1 - b2) steps would otherwise stay too small for the rest of the run.
The exchange may be any method; low rank works here, where it lags if Adam is given a compressed gradient. Scales are
per block of a tensor. At a lossy freeze v is floored at a fraction of its tensor's mean: a coordinate whose gradient
was always zero would otherwise be driven by compression noise over eps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.combine import after
from thinwire.core.method import Dense, Method
from thinwire.core.value import finite
from thinwire.optim.common import (
    check_at_least_zero,
    check_attached,
    check_same_in_all_groups,
    evaluate,
    exchange_of,
)
from thinwire.registry import Recipe

STABLE = 0.96


class APMSqueeze(Optimizer):
    """Adam whose momentum is exchanged compressed, once its variance has settled.

    warmup_steps: Steps of dense Adam, best 15 to 25 % of the run; auto ends them by the published rule.
    exchange: The method that the momentum is exchanged by; on the command line, apm+method.
    v_floor: Least share of its tensor's mean that v has after the freeze.
    bias_correction: Correct m and v for their start from zero.
    weight_decay: Decoupled, as in AdamW.

    Bytes: 2 (W-1)/W d (1/8 + 4/2048), past the warm-up
    Use: Adam: 30x less near its loss and at its learning rate, once the variance has settled.
    Avoid: runs too short for a dense warm-up of 15 to 25 %; with a GradScaler.
    """

    attached = False
    exchanges_gradient = False  # errors are in units of momentum, whatever the learning rate

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int | Literal["auto"] = "auto",
        exchange: str | Recipe | Method = "dist-ef-block",
        v_floor: float = 1e-2,
        bias_correction: bool = True,
    ) -> None:
        check_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay, v_floor=v_floor)
        if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas must be two numbers in [0, 1), not {betas}")
        if warmup_steps != "auto" and (type(warmup_steps) is not int or warmup_steps < 1):
            raise ValueError(f"warmup_steps must be 'auto' or at least 1, not {warmup_steps!r}")
        shared = {"step": 0, "frozen_at": 0, "v_norms": [], "last_lr": 0.0}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **shared})
        check_same_in_all_groups(self, "betas")
        self._warmup_steps = warmup_steps
        self._v_floor = v_floor
        self._bias_correction = bias_correction
        method = exchange_of(exchange)
        self._lossless = isinstance(method, Dense)
        self.method = after(_Frozen(self), method)

    @property
    def frozen(self) -> bool:
        """Whether the warm-up is over: v is frozen and the exchange is compressed."""
        return bool(self.param_groups[0]["frozen_at"])

    def outgoing(self, parameter: Tensor, grad: Tensor) -> Tensor:
        if not self.frozen:
            return grad
        m, beta = self._buffers(parameter)[0], self.defaults["betas"][0]
        return grad.lerp_(m, beta) if grad.dtype == m.dtype else torch.lerp(grad.to(m.dtype), m, beta)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if self.frozen:
            check_attached(self)
        loss = evaluate(closure)
        frozen, (beta1, beta2) = self.frozen, self.defaults["betas"]
        correction1, correction2 = self._corrections(beta1, beta2)
        scale = math.sqrt(correction2)
        for group in self.param_groups:
            for x in (p for p in group["params"] if p.grad is not None):
                m, v = self._buffers(x)
                g = x.grad.to(m.dtype)
                if not finite(g):
                    direction = g  # spoils x, as with any optimizer, but m and v stay clean
                elif frozen:
                    direction = m.copy_(g)
                else:
                    direction = m.lerp_(g, 1 - beta1)
                    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                spread = v if frozen else v.sqrt().add_(group["eps"] * scale)  # of which the correction is a factor
                if group["weight_decay"]:
                    x.mul_(1 - group["lr"] * group["weight_decay"])
                x.addcdiv_(direction, spread, value=-group["lr"] * scale / correction1)
        self._count()
        return loss

    def _count(self) -> None:
        """Count the step, and freeze v when the warm-up is over."""
        lead = self.param_groups[0]
        lead["step"] += 1
        if lead["frozen_at"]:
            return
        over = self._settled(lead) if self._warmup_steps == "auto" else lead["step"] >= self._warmup_steps
        if over:
            self._freeze()

    def _settled(self, lead: dict[str, Any]) -> bool:
        span = round(1 / (1 - self.defaults["betas"][1]))
        norms = lead["v_norms"] = [*lead["v_norms"], self._v_sum()][-span - 1 :]
        rising, lead["last_lr"] = lead["lr"] > lead["last_lr"], float(lead["lr"])
        return len(norms) > span and not rising and norms[-1] >= STABLE * norms[0]

    def _freeze(self) -> None:
        """From now on v, floored, is kept as what m is divided by, in v's own memory."""
        lead, overall = self.param_groups[0], self._v_sum() / max(1, sum(p.numel() for p in self.state))
        lead["frozen_at"], lead["v_norms"] = lead["step"], []
        scale = math.sqrt(self._corrections(*self.defaults["betas"])[1])
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.requires_grad):
                v = self._buffers(p)[1]
                if not self._lossless:
                    mean = v.mean().item() if v.numel() else 0.0
                    v.clamp_(min=self._v_floor * (mean or overall))
                self.state[p]["spread"] = self.state[p].pop("exp_avg_sq").sqrt_().add_(group["eps"] * scale)

    def _v_sum(self) -> float:
        return sum(self._buffers(p)[1].sum(dtype=torch.float64).item() for p in self.state)

    def _corrections(self, beta1: float, beta2: float) -> tuple[float, float]:
        if not self._bias_correction:
            return 1.0, 1.0
        now = self.param_groups[0]["step"] + 1
        frozen_at = self.param_groups[0]["frozen_at"]
        return 1 - beta1**now, 1 - beta2 ** (frozen_at or now)

    def _buffers(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """m, and v or once that is frozen sqrt v + eps."""
        state = self.state[parameter]
        if not state:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        return state["exp_avg"], state["exp_avg_sq" if "exp_avg_sq" in state else "spread"]


class _Frozen:
    """The condition on which compression starts, printed without the optimizer that it asks."""

    def __init__(self, optimizer: APMSqueeze) -> None:
        self._optimizer = optimizer

    def __call__(self) -> bool:
        return self._optimizer.frozen

    def __repr__(self) -> str:
        return "frozen"
