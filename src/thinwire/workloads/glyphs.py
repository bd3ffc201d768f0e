"""A synthetic set of images, so that the image workload runs on any machine without a download."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 28
FONT = """
.###. ..#.. .###. ####. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# ....# ..##. #.... #.... ....# #...# #...#
#...# ..#.. ....# ....# .#.#. ####. #.... ...#. #...# #...#
#...# ..#.. ...#. .###. #..#. ....# ####. ..#.. .###. .####
#...# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... ....# ...#. #...# #...# ..#.. #...# ....#
.###. .###. ##### ####. ...#. .###. .###. ..#.. .###. .###.
"""


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 28, 28) and labels: a digit that is shifted, scaled, turned and slanted.

    A second, smaller and fainter digit and noise distract from it. Everything is drawn from ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    def digits() -> Tensor:
        return torch.randint(10, (count,), generator=generator)

    def place(labels: Tensor, scale: Tensor, shift: float) -> Tensor:
        turn, slant = uniform(-0.35, 0.35), uniform(-0.3, 0.3)
        return _render(labels, scale, turn, slant, uniform(-shift, shift), uniform(-shift, shift))

    labels = digits()
    image = place(labels, uniform(0.45, 0.75), 0.3) * uniform(0.5, 1.0).view(-1, 1, 1, 1)
    image += place(digits(), uniform(0.15, 0.3), 0.8) * uniform(0.2, 0.6).view(-1, 1, 1, 1)
    image += 0.2 * torch.randn(image.shape, generator=generator)
    return (image.clamp_(0, 1) * 255).byte(), labels


def _font() -> Tensor:
    rows = [[[cell == "#" for cell in glyph] for glyph in line.split()] for line in FONT.split("\n") if line]
    return torch.tensor(rows, dtype=torch.float32).transpose(0, 1).unsqueeze(1)


def _render(labels: Tensor, scale: Tensor, turn: Tensor, slant: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Each pixel looks up where it lies in its glyph: the inverse of moving the glyph into the image."""
    cos, sin = turn.cos() / scale, turn.sin() / scale
    # A glyph is 5 wide and 7 high.
    across = torch.stack([cos + slant * sin, sin - slant * cos], dim=1) * 7 / 5
    down = torch.stack([-sin, cos], dim=1)
    linear = torch.stack([across, down], dim=1)
    offset = -(linear @ torch.stack([x, y], dim=1).unsqueeze(2))
    size = [len(labels), 1, SIDE, SIDE]
    grid = F.affine_grid(torch.cat([linear, offset], dim=2), size, align_corners=False)
    return F.grid_sample(_font()[labels], grid, align_corners=False)
