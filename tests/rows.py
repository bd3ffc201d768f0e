"""The contract table: every registry row, past its warm-up, with what it promises."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.registry import METHODS


@dataclass(frozen=True)
class Row:
    spec: str
    warm_up: int = 0
    momentum: float = 0.0
    """Of the workers: what is sent is then g plus momentum."""
    rounding: float = 1e-6
    """Relative error of the conserved sum: methods without error feedback lose what they round away."""
    rounds: int = 1
    """Collectives a step of four workers, in one bucket, past the warm-up."""
    loses: str = ""
    """Why what is applied and what is owed do not add up to what was put in, if they do not."""

    def __str__(self) -> str:
        return self.spec


ROWS = [
    Row("dense"),
    Row("fp16", rounding=2**-10),
    Row("bf16", rounding=2**-7),
    Row("powersgd:rank=2", rounds=2),
    Row("powersgd:rank=2,after=2", warm_up=2, rounds=2),
    Row("acp:rank=2"),
    Row("acp:rank=3,after=2,min_size=20", warm_up=2),
    Row("dist-ef", rounds=2),
    Row("dist-ef:momentum=0.9,after=1", warm_up=1, momentum=0.9, rounds=2),
    Row("dist-ef-block", rounds=2),
    Row("dist-ef-block:momentum=0.9", momentum=0.9, rounds=2),
    Row("dist-ef-block:momentum=0.5,after=2,min_dims=2", warm_up=2, momentum=0.5, rounds=2),
    Row("topk:ratio=0.1", rounds=2),  # an all-reduce of the dense tensors beside it
    Row("topk:ratio=0.2,after=2,min_dims=2", warm_up=2, rounds=2),
    Row("randk:ratio=0.1"),
    Row("randk:ratio=0.2,after=1", warm_up=1),
    Row("dgc:ratio=0.1,momentum=0,warmup_steps=2", rounds=2),
    Row("dgc:ratio=0.2,momentum=0.5,clip=50,warmup_steps=3", rounds=2, loses="sending a coordinate ends its momentum"),
    Row("gtopk:ratio=0.3", rounds=4),  # two up the tree and two down
    Row("gtopk:ratio=0.2,after=2", warm_up=2, rounds=4),
]

assert {row.spec.partition(":")[0] for row in ROWS} == METHODS.keys(), "every method stands in the table"
