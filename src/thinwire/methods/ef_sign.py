"""EF-signSGD. Karimireddy, Rebjock, Stich, Jaggi 2019, arXiv 1901.09847, Algorithms 1 and 2.

    p_i = g_i + (eta_{t-1}/eta_t) e_i                    the paper keeps e in units of the parameters
    D_i = (|p_i|_1 / d) sign(p_i) for each tensor;   e_i = p_i - D_i
    out = mean_i D_i

One-way: each worker gathers the others' signs, (W-1) d/8 bytes, and no second error arises. sign(0) is +1.

Departure: biases and norms go dense, as they do for all sign methods here. From 32 workers on, signs would no longer
halve the bytes of an all-reduce, and every tensor goes dense. eta_{t-1}/eta_t is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.combine import Rule, error_feedback, where
from thinwire.core.lift import gathered
from thinwire.core.method import Method
from thinwire.methods.signs import ScaledSign


@dataclass(frozen=True, slots=True, kw_only=True)
class EFSign:
    """One-way 1-bit with error feedback; a scale for each tensor.

    Bytes: (W-1) (d/8 + 4)
    Use: few workers, where one round matters more than bytes.
    Avoid: more than about 8 workers: the bytes grow with W, and from 32 on all goes dense.
    """

    max_ratio: float = 10.0
    """Bound on eta_{t-1}/eta_t, by which the errors follow the learning rate."""

    def __post_init__(self) -> None:
        if not self.max_ratio >= 1:
            raise ValueError(f"max_ratio must be at least 1, not {self.max_ratio}")

    def method(self) -> Method:
        return where(Rule(min_dims=2), error_feedback(gathered(ScaledSign()), self.max_ratio))
