"""S-SGD: synchronous SGD as PyTorch DDP does it, the baseline that every method is measured against.

out = mean_i g_i
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.method import Dense, Method


@dataclass(frozen=True, slots=True, kw_only=True)
class SSGD:
    """All-reduce in the gradient's own precision."""

    def method(self) -> Method:
        return Dense(own=True)
