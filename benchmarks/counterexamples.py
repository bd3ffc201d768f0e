"""Where signs alone fail and error feedback mends them. Karimireddy, Rebjock, Stich, Jaggi 2019, arXiv 1901.09847,
section 3: three small problems, one worker, the same falling rate for every method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import thinwire as tw

STEPS = 2000
SEEN = sorted({round(STEPS ** (i / 25)) for i in range(26)})
METHODS = {
    "sign-mv": "sign-mv:momentum=0",
    "full precision": "dense",
    "ef-sign": "ef-sign:min_dims=0,min_saving=0",
    "dist-ef": "dist-ef",
}


@dataclass(frozen=True)
class Example:
    start: list[float]
    gradient: Callable[[Tensor, float], Tensor]
    """Of a sample, which a number drawn evenly from 0 to 1 chooses."""
    gap: Callable[[Tensor], float]
    """What f is above its minimum."""
    bound: float = math.inf
    """Of every coordinate."""


PLUS, MINUS = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])
LEFT, RIGHT = 0.5 * PLUS + MINUS, 0.5 * PLUS - MINUS


def corner(x: Tensor, drawn: float) -> Tensor:
    plus, minus = (1.0 if t >= 0 else -1.0 for t in (x @ PLUS, x @ MINUS))
    return plus / 2 * PLUS + minus * MINUS


def square(x: Tensor, drawn: float) -> Tensor:
    a = LEFT if drawn < 0.5 else RIGHT
    return 4 * (a @ x) * a


EXAMPLES = {
    "x/4, by gradients 4 and -1": Example(
        [0.0],
        lambda x, drawn: torch.full_like(x, 4.0 if drawn < 0.25 else -1.0),
        lambda x: (x.item() + 1) / 4,
        bound=1.0,
    ),
    "|x+y|/2 + |x-y|": Example([1.0, 1.0], corner, lambda x: (abs(x @ PLUS) / 2 + abs(x @ MINUS)).item()),
    "two squares, one at a time": Example(
        [1.0, 1.0], square, lambda x: ((LEFT @ x).square() + (RIGHT @ x).square()).item()
    ),
}


def measure() -> dict[str, dict[str, list[float]]]:
    """By example and method, the gap at the steps ``SEEN``."""
    return {
        name: {method: descended(example, spec) for method, spec in METHODS.items()}
        for name, example in EXAMPLES.items()
    }


def descended(example: Example, spec: str) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    x, simulation, gaps = torch.tensor(example.start), tw.Simulation(spec, 1), []
    for step in range(STEPS):
        lr = 0.05 / math.sqrt(1 + step / 10)
        gradient = example.gradient(x, torch.rand((), generator=generator).item())
        x = (x - lr * simulation.reduce([{"x": gradient}], lr=lr)[0]["x"]).clamp(-example.bound, example.bound)
        if step + 1 in SEEN:
            gaps.append(example.gap(x))
    return gaps


def table(examples: dict[str, dict[str, list[float]]]) -> None:
    print(f"\nWhat f is above its minimum after {STEPS} steps\n")
    print(f"| f | start | {' | '.join(METHODS)} |\n{'|---' * (len(METHODS) + 2)}|")
    for name, curves in examples.items():
        start = EXAMPLES[name].gap(torch.tensor(EXAMPLES[name].start))
        shown = name.replace("|", "\\|")
        print(f"| {shown} | {start:g} | {' | '.join(f'{c[-1]:.4f}' for c in curves.values())} |")
