"""From ``"acp:rank=4"`` to a method. A new method adds one row here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, runtime_checkable

from thinwire import spec as grammar
from thinwire.core import price as pricing
from thinwire.core.combine import Local, Rule, Where, after, where
from thinwire.core.method import Method
from thinwire.methods.acp import ACP
from thinwire.methods.dense import SSGD
from thinwire.methods.dgc import DGC
from thinwire.methods.dist_ef import DistEF, DistEFBlock
from thinwire.methods.dq import DQ
from thinwire.methods.ef_sign import EFSign
from thinwire.methods.gs import GS
from thinwire.methods.gtopk import GTopK
from thinwire.methods.half import BF16, FP16
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.qsgd import QSGD
from thinwire.methods.randk import RandK
from thinwire.methods.sign_mv import SignMV
from thinwire.methods.sketch import Sketch
from thinwire.methods.topk import TopK


@runtime_checkable
class Recipe(Protocol):
    """A dataclass of options that says which method they make."""

    def method(self) -> Method:
        """The whole method: error feedback, momentum and the tensors that it takes included."""


METHODS: dict[str, type[Recipe]] = {
    "dense": SSGD,
    "fp16": FP16,
    "bf16": BF16,
    "powersgd": PowerSGD,
    "acp": ACP,
    "dist-ef": DistEF,
    "dist-ef-block": DistEFBlock,
    "sign-mv": SignMV,
    "ef-sign": EFSign,
    "qsgd": QSGD,
    "dq": DQ,
    "topk": TopK,
    "randk": RandK,
    "dgc": DGC,
    "gtopk": GTopK,
    "sketch": Sketch,
    "gs": GS,
}

RULE_OPTIONS = [f.name for f in fields(Rule)]
COMMON_OPTIONS = ["after", *RULE_OPTIONS]
"""Options that every method takes: steps of dense warm-up, and the rule for which tensors it takes."""


def resolve(method: str | Recipe | Method) -> Method:
    """The method that a spec, a recipe or a method stands for."""
    if isinstance(method, str):
        return parse(method)
    if isinstance(method, Recipe):
        return method.method()
    if isinstance(method, Method):
        return method
    raise ValueError(f"expected a spec such as 'acp:rank=4' or a method, not {type(method).__name__}")


def parse(text: str) -> Method:
    """``name:key=value,...`` with the options of the method and the common ones."""
    name, options = grammar.split(text)
    recipe = METHODS[grammar.choose("method", name, METHODS)]
    own = grammar.options_of(recipe)
    common = {k: v for k, v in options.items() if k in COMMON_OPTIONS and k not in own}
    for key in options:
        if key not in own and key not in common:
            grammar.choose(f"option of {name!r}:", key, [*own, *COMMON_OPTIONS])
    method = grammar.build(recipe, name, {k: v for k, v in options.items() if k in own}).method()
    rule = {k: v for k, v in common.items() if k in RULE_OPTIONS}
    if rule:
        if method.whole:
            raise ValueError(f"{name} takes the whole gradient as one vector: {', '.join(rule)} has no meaning")
        parsed = grammar.build(Rule, name, rule)
        method = _ruled(method, {k: getattr(parsed, k) for k in rule})
    if "after" in common:
        method = after(grammar.number(name, "after", common["after"]), method)
    return method


def _ruled(method: Method, changes: Mapping[str, Any]) -> Method:
    if isinstance(method, Local):
        return method.around(_ruled(method.inner, changes))
    if isinstance(method, Where):
        return replace(method, rule=replace(method.rule, **changes))
    return where(Rule(**changes), method)


def price(
    method: str | Recipe | Method,
    shapes: Mapping[str, Sequence[int]],
    workers: int,
    step: int | None = None,
    rank: int = 0,
) -> list[tuple[str, int]]:
    """``[("all_reduce", bytes), ...]``: the collectives of one step, with the bytes that worker ``rank`` sends.

    ``step`` counts from 0, warm-up included; by default it is a first step past every warm-up. Where workers send
    differently, as in a tree, rank 0 sends the most.
    """
    return pricing.price(resolve(method), shapes, workers, step, rank)
