"""What the methods of one bit share: dist-EF (arXiv 1905.10936) and EF-signSGD (arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from thinwire import kernels
from thinwire.core.method import Task
from thinwire.core.value import Sum, finite_each


class Signs(NamedTuple):
    scale: Tensor  # (rows, ceil(columns / block))
    bits: Tensor  # (rows, ceil(columns / 8)) uint8


@dataclass(frozen=True, slots=True)
class ScaledSign:
    """C(x) = omega (|x|_1 / d) sign(x) for each block, omega = min(d |x|_2^2 / |x|_1^2, relaxation)."""

    unmade: ClassVar[bool] = True
    fused: ClassVar[bool] = True
    block: int = 0
    """Most elements that share a scale; 0 for all of a row."""
    relaxation: float = 1.0

    def encode(self, batch: Sequence[tuple[Tensor | Sum, int, int]]) -> list[Signs]:
        given = [(x, rows, columns, self._block(columns), self.relaxation) for x, rows, columns in batch]
        return [Signs(*signs) for signs in kernels.encode_signs(given)]

    def decode(self, batch: Sequence[tuple[Signs, int, Tensor]]) -> None:
        kernels.decode_signs([(*signs, columns, self._block(columns), out) for signs, columns, out in batch])

    def add(self, batch: Sequence[Any]) -> None:
        kernels.add_signs([(*signs, columns, self._block(columns), *onto) for signs, columns, *onto in batch])

    def settle(self, batch: Sequence[tuple[Signs, Signs, int, Sum]]) -> None:
        kernels.settle_signs([(*sent, *mean, n, self._block(n), p.x, p.error, p.ratio) for sent, mean, n, p in batch])

    def serve(self, batch: Sequence[Task]) -> list[Signs]:
        given = [(*t.received, t.columns, self._block(t.columns), t.error, t.ratio, self.relaxation) for t in batch]
        return [Signs(*answer) for answer in kernels.serve_signs(given)]

    def settle_served(self, batch: Sequence[tuple[Task, Signs]]) -> None:
        rows = ((*t.received, *own, t.columns, self._block(t.columns), t.error, t.ratio) for t, own in batch)
        kernels.settle_served_signs(list(rows))

    def finite(self, batch: Sequence[Signs]) -> list[bool]:
        return finite_each([payload.scale for payload in batch])

    def _block(self, columns: int) -> int:
        row = columns + -columns % 8
        return min(self.block, row) if self.block else row
