"""Scales from figures to places on a chart, and where their ticks are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps ``low .. high`` to ``start .. end``, evenly or by orders of magnitude."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float, log: bool = False) -> Scale:
        """One that has room for all the values."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if log:
            low = max(low, high * 1e-9, 1e-9)
        if high <= low:
            high = low * 2 or 1.0
        return cls(low, high, start, end, log)

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """About ``count`` round numbers inside the scale."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1,), (1, 3), (1, 2, 5)):
                ticks = [m * 10.0**p for p in powers for m in steps if self.low <= m * 10.0**p <= self.high]
                if len(ticks) >= count / 2:
                    break
            return ticks
        raw = (self.high - self.low) / count
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
