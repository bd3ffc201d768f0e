"""The kernels in plain torch: what each one means, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def encode_signs(x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row, the mean magnitude of the real columns, and a bit a column: 1 where x >= 0.

    x (..., n), sizes (..., 1) -> scale (..., 1), bits (..., ceil(n / 8)), the first column in the lowest bit.
    """
    total = x.abs().sum(-1, keepdim=True, dtype=torch.float64)  # so that the order of summation hardly shows
    scale = (total / sizes.clamp(min=1)).to(x.dtype)
    positive = pad(x >= 0, (0, -x.shape[-1] % 8))
    bytewise = positive.view(*x.shape[:-1], -1, 8).to(torch.uint8) << _shifts(x.device)
    return scale, bytewise.sum(-1, dtype=torch.uint8)


def decode_signs(scale: Tensor, bits: Tensor, n: int) -> Tensor:
    """scale (..., 1), bits (..., ceil(n / 8)) -> (..., n): plus or minus the row's scale."""
    positive = (bits.unsqueeze(-1) >> _shifts(bits.device)).bitwise_and_(1).flatten(-2)[..., :n].bool()
    return torch.where(positive, scale, -scale)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
