"""A byte-level GPT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.workloads.common import batch_generator, check_range, device_of, evaluating, evenly, seeded
from thinwire.workloads.text import read_text

VOCABULARY = 256
EVALUATION_TOKENS = 16_384
EVALUATION_BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class LmOptions:
    """Predict the next byte of a text. The data is a text file, else the Python standard library's source."""

    layers: int = 4
    """Number of transformer blocks."""
    width: int = 384
    """Width of the residual stream, a multiple of ``head``."""
    head: int = 64
    """Width of one attention head."""
    context: int = 64
    """Length of the training sequences in bytes."""
    batch: int = 8
    """Sequences per worker and step."""
    clip: float = 1.0
    """Largest norm of the averaged gradient; 0 for no limit."""

    def __post_init__(self) -> None:
        check_range("lm", "layers", self.layers, 1, 64)
        check_range("lm", "width", self.width, 8, 4096)
        check_range("lm", "head", self.head, 8, 256)
        check_range("lm", "context", self.context, 8, 4096)
        check_range("lm", "batch", self.batch, 1, 4096)
        if not self.clip >= 0:
            raise ValueError(f"lm: option clip={self.clip} is out of range: it must be at least 0")
        if self.width % self.head:
            raise ValueError(f"lm: option width={self.width} is not a multiple of head={self.head}")

    def load(self, data: Path | None, seed: int) -> LmWorkload:
        return LmWorkload(self, data, seed)


class Block(nn.Module):
    """Pre-norm causal attention and MLP."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self._attend(self.qkv(self.attention_norm(x))))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x

    def _attend(self, qkv: Tensor) -> Tensor:
        batch, time, _ = qkv.shape
        q, k, v = qkv.view(batch, time, 3, -1, self.head).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Gpt(nn.Module):
    """Bytes of shape (batch, time) to logits of shape (batch, time, 256)."""

    def __init__(self, options: LmOptions) -> None:
        super().__init__()
        width = options.width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(options.context, width)
        self.blocks = nn.Sequential(*(Block(width, options.head) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(width)
        self.unembed = nn.Linear(width, VOCABULARY, bias=False)
        # As in GPT-2: the residual stream's variance must not grow with depth.
        residual_std = 0.02 / math.sqrt(2 * options.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=residual_std if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.unembed(self.norm(self.blocks(x)))
        return logits


class LmWorkload:
    """A :class:`Gpt` on a text whose last tenth is for validation."""

    name = "lm"

    def __init__(self, options: LmOptions, data: Path | None, seed: int) -> None:
        text = read_text(data)
        needed = 10 * (options.context + 1)
        if len(text) < needed:
            raise ValueError(f"data has {len(text)} bytes: lm with context={options.context} needs {needed}")
        self.options = options
        self.clip = options.clip
        self.seed = seed
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        split = len(text) - len(text) // 10
        self.training, self.validation = tokens[:split], tokens[split:]
        with seeded(seed):
            self.model: nn.Module = Gpt(options)

    def loss(self, model: nn.Module, step: int, rank: int, world: int) -> Tensor:
        return _next_byte_loss(model, self.windows(step, rank))

    def windows(self, step: int, rank: int) -> Tensor:
        """The rank's batch: bytes of shape (batch, context + 1)."""
        generator = batch_generator(self.seed, step, rank)
        last = len(self.training) - self.options.context
        return self._cut(self.training, torch.randint(last, (self.options.batch,), generator=generator))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        context = self.options.context
        starts = evenly(len(self.validation) - context, max(1, EVALUATION_TOKENS // context))
        windows = self._cut(self.validation, starts)
        with evaluating(model):
            parts = torch.split(windows, max(1, EVALUATION_BATCH_TOKENS // context))
            total = sum(_next_byte_loss(model, part).item() * len(part) for part in parts)
        return {"val_loss": total / len(windows)}

    def _cut(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts[:, None] + torch.arange(self.options.context + 1)].long()


def _next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    windows = windows.to(device_of(model))
    logits: Tensor = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
