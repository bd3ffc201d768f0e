"""dist-EF-SGD, dist-EF-blockSGD(M). Zheng, Huang, Kwok 2019, arXiv 1905.10936, Algorithms 2 and 3.

    worker i   m_i = mu m_i + g_i
               p_i = mu m_i + g_i + (eta_{t-1}/eta_t) e_i
               D_i[b] = omega (|p_i[b]|_1 / d_b) sign(p_i[b]) for each block b;   e_i = p_i - D_i;   push D_i
    server     p~  = mean_i D_i + (eta_{t-1}/eta_t) e~;   D~ = the same compression;   e~ = p~ - D~;   pull D~

Departure: omega is 1 in the paper. That leaves the least error in one step, but hands over only delta = |p|_1^2 / (d
|p|_2^2) of p along p, and training lags by what waits. For blocks omega is 1 / delta, by which all of p is handed over
along p, and at most 1.5: the error, (1 - omega (2 - omega) delta) |p|_2^2, contracts below 2, so the proof holds. A
block is at most ``block`` elements rather than a whole layer: the rows of an embedding differ in scale by orders of
magnitude, and a common scale drives the quiet ones by noise. Biases and norms, a hundredth of a model or less, travel
in bf16 with error feedback: in one bit they made transformers unstable. The server is shared out, rank j serving chunk
j of each tensor, so blocks are cut at the chunks' borders too. eta_{t-1}/eta_t is bounded, since a schedule that goes
to zero makes it infinite; a step whose rate is zero applies nothing and leaves the errors alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.combine import Rule, error_feedback, where, whole
from thinwire.core.lift import two_way
from thinwire.core.method import Method
from thinwire.core.momentum import nesterov
from thinwire.methods.signs import ScaledSign


@dataclass(frozen=True, slots=True, kw_only=True)
class DistEF:
    """Two-way 1-bit with error feedback; the whole gradient is one block, cut into one chunk a worker.

    Bytes: 2 (W-1)/W (d/8 + 4 W)
    Use: to compare with the paper's plain algorithm.
    Avoid: models whose layers differ in scale, which is most: one scale for a chunk of everything. ``dist-ef-block``
        costs no more.
    """

    momentum: float = 0.0
    """Nesterov momentum on each worker; the optimizer's own is then 0."""
    max_ratio: float = 10.0
    """Bound on eta_{t-1}/eta_t, by which the errors follow the learning rate."""
    relaxation: float = 1.0
    """Most that a scale is of the mean magnitude, below 2. 1 has the least error; above, less waits for later steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if not 0 < self.relaxation < 2:
            raise ValueError(f"relaxation must be above 0 and below 2, not {self.relaxation}")
        if not self.max_ratio >= 1:
            raise ValueError(f"max_ratio must be at least 1, not {self.max_ratio}")

    def method(self) -> Method:
        return nesterov(self.momentum, whole(self.exchange()))

    def exchange(self, block: int = 0) -> Method:
        return error_feedback(two_way(ScaledSign(block, self.relaxation), self.max_ratio), self.max_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistEFBlock(DistEF):
    """Two-way 1-bit with error feedback; a scale for each block of a tensor.

    Bytes: 2 (W-1)/W d (1/8 + 4/block)
    Use: SGD, at any number of workers: 30x less, whatever the shapes. With momentum, ``dist-ef-sgdm`` sets all of it
        up.
    Avoid: Adam, which divides by a variance that signs distort: see ``apm``. A transformer's first steps: ``after``.
    """

    relaxation: float = 1.5
    block: int = 2048
    """Most elements that share a scale, a multiple of 8; 0 makes a tensor's chunk one block."""

    def __post_init__(self) -> None:
        DistEF.__post_init__(self)
        if self.block < 0 or self.block % 8:
            raise ValueError(f"block must be 0 or a multiple of 8, not {self.block}")

    def method(self) -> Method:
        return nesterov(self.momentum, where(Rule(min_dims=2), self.exchange(self.block)))
