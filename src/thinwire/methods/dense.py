"""S-SGD: synchronous SGD as PyTorch DDP does it, the baseline that every method is measured against.

out = mean_i g_i
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.method import Dense, Method


@dataclass(frozen=True, slots=True, kw_only=True)
class SSGD:
    """All-reduce in the gradient's own precision.

    Bytes: 8 d (W-1)/W
    Use: the baseline; and wherever the wire is not what training waits for.
    Avoid: links of 1 Gb/s and less, where it is most of a step.
    """

    def method(self) -> Method:
        return Dense(own=True)
