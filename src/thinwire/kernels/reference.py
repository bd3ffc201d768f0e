"""The kernels in plain torch: what each one means, on any device.

A vector of d numbers is cut into rows of ``columns``, the last of which may be short or empty, and each row into blocks
of ``block``, a multiple of 8. Each block has a scale and each number a bit, the first in the lowest bit of its byte.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def encode_signs(x: Tensor, rows: int, columns: int, block: int) -> tuple[Tensor, Tensor]:
    """x (d,) -> scale (rows, ceil(columns / block)): the mean magnitude of each block, 0 if it is empty;
    bits (rows, ceil(columns / 8)): 1 where x >= 0, and 0 where there is no number.
    """
    d, missing = len(x), rows * columns - len(x)
    blocks = pad(pad(x, (0, missing)).view(rows, columns), (0, -columns % block)).view(rows, -1, block)
    real = torch.arange(rows * columns, device=x.device).view(rows, columns) < d
    count = pad(real, (0, -columns % block)).view(rows, -1, block).sum(-1)
    total = blocks.abs().sum(-1, dtype=torch.float64)  # so that the order of summation hardly shows
    positive = pad(pad(x >= 0, (0, missing)).view(rows, columns), (0, -columns % 8))
    bytewise = positive.view(rows, -1, 8).to(torch.uint8) << _shifts(x.device)
    return (total / count.clamp(min=1)).to(x.dtype), bytewise.sum(-1, dtype=torch.uint8)


def decode_signs(scale: Tensor, bits: Tensor, columns: int, block: int, out: Tensor) -> None:
    """out (d,) = plus or minus the block's scale."""
    out.copy_(_signs(scale, bits, columns, block)[: len(out)])


def add_signs(scale: Tensor, bits: Tensor, columns: int, block: int, base: Tensor, alpha: float, out: Tensor) -> None:
    """out (d,) = base + alpha times the decoded signs; ``out`` may be ``base``."""
    torch.add(base, _signs(scale * alpha, bits, columns, block)[: len(out)], out=out)


def top_k(x: Tensor, k: int) -> Tensor:
    """The places (k,) of the largest magnitudes of x (d,), in rising order; of equal ones the first are taken.

    NaN counts as infinite.
    """
    if x.is_meta:
        return x.new_empty(k, dtype=torch.int64)
    size = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = size.topk(k).values.min()
    above = (size > least).nonzero().flatten()
    level = (size == least).nonzero().flatten()[: k - len(above)]
    return torch.cat([above, level]).sort().values


def _signs(scale: Tensor, bits: Tensor, columns: int, block: int) -> Tensor:
    positive = (bits.unsqueeze(-1) >> _shifts(bits.device)).bitwise_and_(1).flatten(-2)[:, :columns].bool()
    scale = scale.repeat_interleave(block, -1)[:, :columns]
    return torch.where(positive, scale, -scale).flatten()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
