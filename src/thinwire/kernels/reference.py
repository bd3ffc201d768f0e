"""The kernels in plain torch: what each one means, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def encode_signs(x: Tensor, sizes: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For each block of columns, the mean magnitude of the real ones; and a bit a column: 1 where x >= 0.

    x (..., n), sizes (..., 1) real columns of each row, block: a multiple of 8
    -> scale (..., ceil(n / block)), bits (..., ceil(n / 8)), the first column in the lowest bit.
    """
    blocks = pad(x, (0, -x.shape[-1] % block)).view(*x.shape[:-1], -1, block)
    total = blocks.abs().sum(-1, dtype=torch.float64)  # so that the order of summation hardly shows
    scale = (total / block_sizes(sizes, total.shape[-1], block)).to(x.dtype)
    positive = pad(x >= 0, (0, -x.shape[-1] % 8))
    bytewise = positive.view(*x.shape[:-1], -1, 8).to(torch.uint8) << _shifts(x.device)
    return scale, bytewise.sum(-1, dtype=torch.uint8)


def decode_signs(scale: Tensor, bits: Tensor, n: int, block: int) -> Tensor:
    """scale (..., ceil(n / block)), bits (..., ceil(n / 8)) -> (..., n): plus or minus the block's scale."""
    positive = (bits.unsqueeze(-1) >> _shifts(bits.device)).bitwise_and_(1).flatten(-2)[..., :n].bool()
    scale = scale.repeat_interleave(block, -1)[..., :n]
    return torch.where(positive, scale, -scale)


def block_sizes(sizes: Tensor, blocks: int, block: int) -> Tensor:
    """How many columns of each block are real, and 1 where none is: (..., 1) -> (..., blocks)."""
    starts = torch.arange(blocks, device=sizes.device) * block
    return (sizes - starts).clamp(1, block)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
