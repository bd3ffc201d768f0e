"""The kernels in plain torch: what each one means, on any device.

A vector of d numbers is cut into rows of ``columns``, the last of which may be short or empty, and each row into blocks
of ``block``, a multiple of 8. Each block has a scale and each number a code of a few bits; codes follow one another
without gaps, the first in the lowest bits of the first byte.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from thinwire.core.value import Sum, settled, wide

MASK = 0xFFFFFFFF
RUN = 32
"""Neighbours that a large sketch keeps together, so that it does not touch a line of the cache for each."""


def encode_signs(x: Tensor | Sum, rows: int, columns: int, block: int, most: float) -> tuple[Tensor, Tensor]:
    """d numbers x -> scale (rows, ceil(columns / block)) of each block: |x|_2^2 / |x|_1, by which the signs have x's
    own length along x, but at most ``most`` times the mean magnitude; 0 if it is empty;
    bits (rows, ceil(columns / 8)): 1 where x >= 0, and 0 where there is no number. A sum is left unmade.
    """
    x = (x.value() if isinstance(x, Sum) else wide(x)).flatten()
    d, missing = len(x), rows * columns - len(x)
    blocks = _blocks(x, rows, columns, block)
    real = torch.arange(rows * columns, device=x.device).view(rows, columns) < d
    count = pad(real, (0, -columns % block)).view(rows, -1, block).sum(-1)
    # in float64, so that the order of summation hardly shows
    total, norm = (torch.linalg.vector_norm(blocks, p, -1, dtype=torch.float64) for p in (1, 2))
    mean = total / count.clamp(min=1)
    spread = (norm.square() / (total * mean)).nan_to_num(1.0)
    positive = pad(x >= 0, (0, missing)).view(rows, columns).to(torch.uint8)
    return (mean * spread.clamp(1.0, most)).to(x.dtype), pack_bits(positive, 1)


def decode_signs(scale: Tensor, bits: Tensor, columns: int, block: int, out: Tensor) -> None:
    """out (d,) = plus or minus the block's scale."""
    out.copy_(_signs(scale, bits, columns, block)[: len(out)])


def add_signs(
    scale: Tensor, bits: Tensor, columns: int, block: int, base: Tensor | Sum, alpha: float, out: Tensor, stacked: bool
) -> None:
    """out (d,) = base + alpha times the decoded signs; ``out`` may be ``base``, or the error of a sum that is not made.

    Where they are ``stacked``, each row stands for all of ``out``, and one after the other is added.
    """
    onto = base.value() if isinstance(base, Sum) else base
    _add(onto, _signs(scale * alpha, bits, columns, block), columns, stacked, out)


def settle_signs(
    scale: Tensor,
    bits: Tensor,
    mean_scale: Tensor,
    mean_bits: Tensor,
    columns: int,
    block: int,
    x: Tensor,
    error: Tensor,
    ratio: float,
) -> None:
    """error = x + ratio * error less the decoded signs, and x = those of the mean, laid out alike."""
    x, error = x.view(-1), error.view(-1)
    add_signs(scale, bits, columns, block, torch.add(x, error, alpha=ratio), -1.0, error, False)
    decode_signs(mean_scale, mean_bits, columns, block, x)


def serve_signs(
    scale: Tensor, bits: Tensor, columns: int, block: int, error: Tensor, ratio: float, most: float
) -> tuple[Tensor, Tensor]:
    """A server's answer, of one row: the signs of a (d,) = ratio * error + the mean of the rows, d <= ``columns``."""
    a = torch.empty_like(error)
    add_signs(scale, bits, columns, block, error * ratio, 1 / len(scale), a, True)
    answer_scale, answer_bits = encode_signs(a, 1, columns, block, most)
    return answer_scale[0], answer_bits[0]


def settle_served_signs(
    scale: Tensor,
    bits: Tensor,
    answer_scale: Tensor,
    answer_bits: Tensor,
    columns: int,
    block: int,
    error: Tensor,
    ratio: float,
) -> None:
    """error = a - its signs"""
    add_signs(scale, bits, columns, block, error.mul_(ratio), 1 / len(scale), error, True)
    add_signs(answer_scale[None], answer_bits[None], columns, block, error, -1.0, error, False)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """codes (rows, n), uint8 below 2**bits -> (rows, ceil(n * bits / 8))."""
    each = (codes.unsqueeze(-1) >> _shifts(codes.device)[:bits]).bitwise_and_(1).flatten(-2)
    bytewise = pad(each, (0, -each.shape[-1] % 8)).view(len(codes), -1, 8) << _shifts(codes.device)
    return bytewise.sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes of each row: the inverse of ``pack_bits``."""
    each = (packed.unsqueeze(-1) >> _shifts(packed.device)).bitwise_and_(1).flatten(-2)[:, : count * bits]
    return (each.view(len(packed), count, bits) << _shifts(packed.device)[:bits]).sum(-1, dtype=torch.uint8)


def encode_levels(
    x: Tensor | Sum, rows: int, columns: int, block: int, bits: int, norm: float, key: int
) -> tuple[Tensor, Tensor]:
    """x (d,) -> scale (rows, ceil(columns / block)): the norm of each block, 2 or inf;
    codes (rows, ceil(columns * bits / 8)): |x| / scale in s = 2**(bits-1) - 1 levels, with x's sign, plus s.

    A number between two levels goes up with the probability of its distance from the lower one, by the key's
    ``uniform`` number at its place. A block without a finite scale above 0 has level 0 throughout.
    """
    x, s = widened(x), 2 ** (bits - 1) - 1
    values = _blocks(x, rows, columns, block)
    scale = torch.linalg.vector_norm(values, norm, -1, dtype=torch.float64).to(x.dtype)
    usable = ((scale > 0) & scale.isfinite()).unsqueeze(-1)
    a = torch.where(usable, values.abs() / scale.unsqueeze(-1) * s, 0.0).flatten(1)[:, :columns]
    u = uniform(rows * columns, key, x.device).view(rows, columns)
    level = (a.floor() + (u < a - a.floor())).clamp(max=s)
    signed = torch.where(values.flatten(1)[:, :columns] < 0, -level, level)
    return scale, pack_bits((signed + s).to(torch.uint8), bits)


def add_levels(
    scale: Tensor,
    codes: Tensor,
    columns: int,
    block: int,
    bits: int,
    base: Tensor,
    alpha: float,
    out: Tensor,
    stacked: bool,
) -> None:
    """out (d,) = base + alpha times the decoded levels; as ``add_signs``."""
    s = 2 ** (bits - 1) - 1
    levels = unpack_bits(codes, bits, columns).to(scale.dtype) - s
    unit = (scale / s * alpha).repeat_interleave(block, -1)[:, :columns]
    _add(base, (unit * levels).flatten(), columns, stacked, out)


def count_sketch(x: Tensor, rows: int, columns: int, key: int) -> Tensor:
    """S (rows, columns), where number j of x (d,) is added to one place of each row, with a sign: both by a hash.

    In a large sketch, runs of neighbours go to neighbouring places, round the row's end, with a sign each. Two of one
    run never meet, any other two do with the chance 1 / columns, and their signs then agree by chance: an estimate has
    the variance that it has where each number goes by itself, since that depends on pairs. But runs meet as a whole.
    """
    sketch = x.new_zeros(rows, columns)
    for r, salt in enumerate(row_keys(rows, key)):
        place, sign = _hashed(len(x), columns, salt, x)
        sketch[r].index_add_(0, place, x * sign)
    return sketch


def estimate(sketch: Tensor, d: int, key: int) -> Tensor:
    """What a sketch of d numbers tells of each: the median over its rows, which are odd in number."""
    rows, columns = sketch.shape
    guesses = []
    for r, salt in enumerate(row_keys(rows, key)):
        place, sign = _hashed(d, columns, salt, sketch)
        guesses.append(sketch[r][place] * sign)
    return torch.stack(guesses).median(0).values


def row_keys(rows: int, key: int) -> list[int]:
    """32 bits for the hash of each row of a sketch."""
    low, high = _mixed(torch.tensor([[key & MASK], [key >> 32]]) ^ torch.arange(rows))
    keys: list[int] = (_mixed(low) ^ high).tolist()
    return keys


def _hashed(d: int, columns: int, salt: int, like: Tensor) -> tuple[Tensor, Tensor]:
    j, run = torch.arange(d, device=like.device), run_length(columns)
    first = _mixed(_mixed(j // run) ^ salt)
    sign = 1 - 2 * (_mixed(first ^ MASK) >> j % run & 1).to(like.dtype)
    return ((first * columns >> 32) + j % run) % columns, sign


def run_length(columns: int) -> int:
    """How many neighbours a sketch keeps together: few beside its columns."""
    return RUN if columns >= 256 * RUN else 1


def uniform(count: int, key: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), in steps of 2**-24, that depend on the key and the place alone."""
    j = torch.arange(count, device=device)
    bits = _mixed(_mixed(_mixed(j) ^ (key & MASK)) ^ (key >> 32))
    return (bits >> 8).to(torch.float32) * 2**-24


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 32-bit numbers that leaves no pattern, on int64."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK
    return x ^ x >> 16


def _blocks(x: Tensor, rows: int, columns: int, block: int) -> Tensor:  # (rows, ceil(columns / block), block)
    padded = pad(x, (0, rows * columns - len(x))).view(rows, columns)
    return pad(padded, (0, -columns % block)).view(rows, -1, block)


def top_k(x: Tensor | Sum, k: int) -> tuple[Tensor, Tensor]:
    """The numbers (k,) of x (d,) with the largest magnitudes, and their places, which rise; of equal ones the first.

    NaN counts as infinite.
    """
    x = widened(x)
    if x.is_meta:
        return x.new_empty(k), x.new_empty(k, dtype=torch.int64)
    size = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    least = size.topk(k).values.min()
    above = (size > least).nonzero().flatten()
    level = (size == least).nonzero().flatten()[: k - len(above)]
    places = torch.cat([above, level]).sort().values
    return x[places], places


def widened(x: Tensor | Sum) -> Tensor:
    """The numbers that a kernel is given: a sum is made first, and 16 bits are read as 32."""
    return wide(settled(x))


def _add(base: Tensor, decoded: Tensor, columns: int, stacked: bool, out: Tensor) -> None:
    for layer in decoded.view(-1, columns) if stacked else [decoded]:
        torch.add(base, layer[: len(out)], out=out)
        base = out


def orthogonalize(P: Tensor) -> Tensor:
    """Orthonormal columns (n, r) such that the first few span what the first few of P span, n >= r.

    Its product with the column of P is not negative. Where that depends on those before it, any direction will do.
    """
    # a fresh copy: how memory is aligned changes the rounding, and a matrix has the same bits in any company
    Q, R = torch.linalg.qr(P.clone(memory_format=torch.contiguous_format))
    found: Tensor = Q * torch.where(R.diagonal() < 0, -1.0, 1.0).to(Q.dtype)
    return found


def bounded(P: Tensor, Q: Tensor) -> bool:
    """Whether the norms of P and Q show that all of P Q^T is finite; NaN shows nothing."""
    bound: float = vector_norm(P, dtype=torch.float64).item() * vector_norm(Q, dtype=torch.float64).item()
    return bound <= torch.finfo(P.dtype).max


def product(x: Tensor, error: Tensor, ratio: float, Q: Tensor) -> Tensor:
    """M Q (n, r), where M (n, m) = x + ratio * error. Sums may be in any order."""
    return torch.add(x, error, alpha=ratio) @ Q


def transposed_product(x: Tensor, error: Tensor, ratio: float, P: Tensor) -> Tensor:
    """M^T P (m, r), computed as (P^T M)^T: with few columns the direct form is many times slower on a CPU."""
    return (P.mT @ torch.add(x, error, alpha=ratio)).mT


def subtract_product(x: Tensor, error: Tensor, ratio: float, P: Tensor, Q: Tensor) -> None:
    """error = M - P Q^T"""
    torch.addmm(torch.add(x, error, alpha=ratio), P, Q.mT, alpha=-1, out=error)


def settle_product(x: Tensor, error: Tensor, ratio: float, P: Tensor, Q: Tensor, M: Tensor, N: Tensor) -> None:
    """error = x + ratio * error - P Q^T, and x = M N^T"""
    subtract_product(x, error, ratio, P, Q)
    write_product(M, N, x)


def write_product(P: Tensor, Q: Tensor, out: Tensor) -> None:
    """out = P Q^T"""
    torch.mm(P, Q.mT, out=out)


def _signs(scale: Tensor, bits: Tensor, columns: int, block: int) -> Tensor:
    positive = unpack_bits(bits, 1, columns).bool()
    scale = scale.repeat_interleave(block, -1)[:, :columns]
    return torch.where(positive, scale, -scale).flatten()


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
