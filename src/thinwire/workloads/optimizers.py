"""From ``"apm:warmup_steps=200+acp:rank=16"`` to an optimizer and what to attach for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import registry
from thinwire import spec as grammar
from thinwire.optim import OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class SGD:
    """torch's SGD with Nesterov momentum; the method averages its gradients."""

    momentum: float = 0.9
    """0 turns it off, for methods that have a momentum of their own."""
    weight_decay: float = 0.0
    """Added to the gradient, times the parameter."""

    def optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, lr, self.momentum, weight_decay=self.weight_decay, nesterov=self.momentum > 0
        )


@dataclass(frozen=True, kw_only=True)
class Adam:
    """torch's Adam; the method averages its gradients."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the mean and of the variance."""
    weight_decay: float = 0.0
    """Decoupled, as in AdamW."""

    def optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr, self.betas, weight_decay=self.weight_decay)


BASES: dict[str, type[SGD] | type[Adam]] = {"sgd": SGD, "adam": Adam}
DEFAULT_OPTIMIZER = {"lm": "adam", "image": "sgd", "mlp": "sgd"}
"""By workload."""
DEFAULT_LR = {"sgd": 0.1, "adam": 1e-3, "apm": 1e-3, "dist-ef-sgdm": 0.1, "root-sgd": 0.1}
WRAPPERS = [name for name, kind in OPTIMIZERS.items() if "base" in inspect.signature(kind).parameters]
"""Optimizers around another one: ``slowmo:base=adam``, else the workload's default; its options are theirs too.

``slowmo:base=gossip`` is around gossip, which is around the workload's default.
"""
GOSSIP = "gossip"


@dataclass(frozen=True, slots=True)
class Recipe:
    """An optimizer's spec and a method's, from ``optimizer+method``, or from either alone."""

    optimizer: str
    method: str | None
    default_base: str = "sgd"

    @classmethod
    def parse(cls, text: str, default_optimizer: str) -> Recipe:
        """Raises ``ValueError`` if it cannot be built."""
        first, plus, second = text.partition("+")
        name = grammar.split(first)[0]
        if plus:
            recipe = cls(first, second, default_optimizer)
        elif name in BASES:
            recipe = cls(first, "dense")
        elif name in OPTIMIZERS:
            recipe = cls(first, None, default_optimizer)
        else:
            grammar.choose("method", name, [*registry.METHODS, *BASES, *OPTIMIZERS])
            recipe = cls(default_optimizer, first)
        recipe.build([torch.nn.Parameter(torch.zeros(1))], None)
        return recipe

    @property
    def default_lr(self) -> float:
        return DEFAULT_LR[self.layers[-1]]

    @property
    def layers(self) -> list[str]:
        """The optimizer's name, and those of the ones that it is around."""
        name, options = grammar.split(self.optimizer)
        if name not in WRAPPERS:
            return [name]
        base = grammar.choose("base", options.get("base", self.default_base), bases_of(name))
        return [name, base] if base in BASES else [name, base, self.default_base]

    @property
    def clips(self) -> bool:
        """Whether the optimizer limits each worker's gradient itself, before the exchange."""
        kind = OPTIMIZERS.get(grammar.split(self.optimizer)[0])
        return kind is not None and "clip" in grammar.options_of(kind)

    def build(
        self, parameters: Iterable[Tensor], lr: float | None, clip: float = 0.0
    ) -> tuple[torch.optim.Optimizer, Any]:
        """The optimizer, and what ``thinwire.attach`` is to be given: itself, or the method under it.

        ``clip`` is for optimizers that clip, unless their spec has one.
        """
        name, options = grammar.split(self.optimizer)
        grammar.choose("optimizer", name, [*BASES, *OPTIMIZERS])
        lr = self.default_lr if lr is None else lr
        if name in BASES:
            assert self.method is not None
            optimizer = grammar.build(BASES[name], name, options).optimizer(list(parameters), lr)
            return optimizer, registry.parse(self.method)
        fixed: dict[str, Any] = {"exchange": registry.parse(self.method)} if self.method else {}
        if self.clips and "clip" not in options:
            fixed["clip"] = clip
        if name == GOSSIP and self.method:
            raise ValueError(f"{name} averages with neighbours alone, uncompressed: it takes no +{self.method}")
        if name not in WRAPPERS:
            owner = grammar.build(OPTIMIZERS[name], name, options, list(parameters), lr=lr, **fixed)
            return owner, owner
        _, *between, base = self.layers
        known = {layer: grammar.options_of(BASES.get(layer) or OPTIMIZERS[layer]) for layer in self.layers}
        for key in options:
            grammar.choose(f"option of {name!r}:", key, ["base", *(option for own in known.values() for option in own)])
        given = {layer: {k: v for k, v in options.items() if k in own} for layer, own in known.items()}
        inner = grammar.build(BASES[base], base, given[base]).optimizer(list(parameters), lr)
        for layer in between:
            inner = grammar.build(OPTIMIZERS[layer], layer, given[layer], inner)
        owner = grammar.build(OPTIMIZERS[name], name, given[name], inner, **fixed)
        return owner, owner


def bases_of(wrapper: str) -> list[str]:
    """What an optimizer may be around."""
    return [*BASES, GOSSIP] if wrapper != GOSSIP else [*BASES]
