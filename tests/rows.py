"""The contract table: every registry row, past its warm-up, with what it promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.registry import METHODS

UNBIASED = "unbiased without error feedback: what is rounded away is lost, and is zero in the mean"

MASKED = {"mass_is_conserved": "sending a coordinate ends its momentum"}
BY_NORM = {
    "mass_is_conserved": UNBIASED,
    "metered_bytes_are_priced_bytes": "its bits follow the gradient's norm, which the price list takes to be constant",
}
SIGN = {
    "mass_is_conserved": "no error feedback, and the output is a sign: the magnitudes are dropped on purpose",
    "compression_contracts": "a sign has no scale, so it may be larger or smaller than what it stands for",
    "a_zero_gradient_is_harmless": "one bit cannot say zero: zeros vote + and - in turn",
    "it_converges_on_a_quadratic": "where the workers disagree, a majority finds a median and not the mean",
}


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
    quadratic_steps: int = 400
    """Within which it comes to 5 % of a quadratic's minimum; one scale for a tensor needs a rate that falls further."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """The laws that do not apply to it, each with the reason why."""

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
    Row("sign-mv", rounds=2, exempt=SIGN),
    Row("sign-mv:momentum=0,after=1", warm_up=1, rounds=2, exempt=SIGN),
    Row("ef-sign", rounds=2, quadratic_steps=600),
    Row("ef-sign:min_dims=0,after=1", warm_up=1, rounds=2, quadratic_steps=600),
    Row("qsgd", rounds=2, exempt={"mass_is_conserved": UNBIASED}),
    Row("qsgd:bits=3,block=16,after=1,min_dims=2", warm_up=1, rounds=2, exempt={"mass_is_conserved": UNBIASED}),
    Row("dq", rounds=2, exempt=BY_NORM),
    Row("dq:target=0.01,total_steps=20,block=16,after=1", warm_up=1, rounds=2, exempt=BY_NORM),
    Row("topk:ratio=0.1", rounds=2),  # an all-reduce of the dense tensors beside it
    Row("topk:ratio=0.2,after=2,min_dims=2", warm_up=2, rounds=2),
    Row("randk:ratio=0.1"),
    Row("randk:ratio=0.2,after=1", warm_up=1),
    Row("dgc:ratio=0.1,momentum=0,warmup_steps=2", rounds=2),
    Row("dgc:ratio=0.2,momentum=0.5,clip=50,warmup_steps=3", rounds=2, exempt=MASKED),
    Row("gtopk:ratio=0.3", rounds=4),  # two up the tree and two down
    Row("gtopk:ratio=0.2,after=2", warm_up=2, rounds=4),
    Row("sketch:ratio=0.05,cols=100", rounds=2),
    Row("sketch:ratio=0.05,rows=3,momentum=0.5,after=1", warm_up=1, rounds=2, exempt=MASKED),
    Row("gs:ratio=0.1,cols=100", rounds=2),
    Row("gs:ratio=0.1,rows=3,momentum=0.5,after=1", warm_up=1, rounds=2, exempt=MASKED),
]

assert {row.spec.partition(":")[0] for row in ROWS} == METHODS.keys(), "every method stands in the table"
