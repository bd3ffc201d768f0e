"""The rates of dist-EF-SGD(M) on a non-convex problem beside full precision, and where signs alone fail.

    python -m benchmarks.rates [--pictures FOLDER]

Everything runs through ``thinwire.Simulation``. The problem is 32 robust regressions of 16 coordinates at once: the
mean of log(1 + r^2) over 1024 points, a fifth of them outliers. Each of M workers holds its share of the points and
draws 4 a step and regression. Zheng, Huang, Kwok 2019 promise for a rate of order sqrt(M/T) that the squared gradient,
averaged over T steps, falls as 1/sqrt(MT): here the rate is 1.2 sqrt(M/T), times 1 - momentum, for all methods alike.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
from benchmarks import counterexamples, panels, pictures

ROWS, COLUMNS, POINTS, BATCH = 32, 16, 1024, 4
STEP = 1.2
LENGTHS, WORKERS = [256, 512, 1024, 2048, 4096], [1, 2, 4, 8, 16]
TYPICAL_WORKERS, TYPICAL_LENGTH = 4, 2048
EVALUATIONS = 512


@dataclass(frozen=True)
class Entry:
    name: str
    method: str
    momentum: float = 0.0

    def reduced(self, simulation: tw.Simulation, state: dict[str, Tensor], inputs: Tensor, lr: float) -> Tensor:
        mean = simulation.reduce([{"x": gradient} for gradient in inputs], lr=lr)[0]["x"]
        if self.method != "dense" or not self.momentum:
            return mean
        m = state["m"] = self.momentum * state.get("m", torch.zeros_like(mean)) + mean
        return self.momentum * m + mean


BLOCKS = f"dist-ef-block:block={COLUMNS}"
ENTRIES = [
    Entry("full precision", "dense"),
    Entry("dist-ef", "dist-ef"),
    Entry("dist-ef-block", f"{BLOCKS},relaxation=1"),
    Entry("dist-ef-block, relaxed", BLOCKS),
    Entry("full precision, momentum", "dense", 0.9),
    Entry("dist-ef, momentum", "dist-ef:momentum=0.9", 0.9),
    Entry("dist-ef-block, momentum", f"{BLOCKS},relaxation=1,momentum=0.9", 0.9),
    Entry("dist-ef-block, relaxed, momentum", f"{BLOCKS},momentum=0.9", 0.9),
]


class Regressions:
    """F(x) = mean over rows and points k of log(1 + (<a_k, x_row> - b_row,k)^2)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a = torch.randn(POINTS, COLUMNS, generator=generator)
        solution = torch.randn(ROWS, COLUMNS, generator=generator)
        clean = solution @ self.a.mT + 0.5 * torch.randn(ROWS, POINTS, generator=generator)
        outliers = torch.rand(ROWS, POINTS, generator=generator) < 0.2
        self.b = torch.where(outliers, 8 * torch.randn(ROWS, POINTS, generator=generator), clean)
        self.generator = torch.Generator().manual_seed(1)

    def squared_gradient(self, x: Tensor) -> Tensor:
        """Of each row."""
        return (slope(x @ self.a.mT - self.b) @ self.a / POINTS).square().sum(1)

    def gradients(self, x: Tensor, workers: int) -> Tensor:
        """Each worker's, from a batch of its own share: (workers, rows, columns)."""
        share = POINTS // workers
        drawn = torch.randint(share, (workers, ROWS, BATCH), generator=self.generator)
        k = drawn + share * torch.arange(workers)[:, None, None]
        a = self.a[k]
        residual = (a * x[:, None]).sum(3) - self.b[torch.arange(ROWS)[:, None], k]
        return (slope(residual)[..., None] * a).mean(2)

    def least_curvature(self, x: Tensor) -> float:
        """The smallest eigenvalue of a row's Hessian."""
        r = x @ self.a.mT - self.b
        bend = 2 * (1 - r.square()) / (1 + r.square()).square()
        return torch.linalg.eigvalsh(torch.einsum("rk,kc,kd->rcd", bend / POINTS, self.a, self.a)).min().item()


def slope(residual: Tensor) -> Tensor:
    return 2 * residual / (1 + residual.square())


def run(entry: Entry, workers: int, length: int) -> Tensor:
    """The squared gradient of each row, averaged over evenly spaced steps."""
    problem, simulation, state = Regressions(), tw.Simulation(entry.method, workers), {}
    lr = STEP * math.sqrt(workers / length) * (1 - entry.momentum)
    x, seen = torch.zeros(ROWS, COLUMNS), []
    for step in range(length):
        if step % -(-length // EVALUATIONS) == 0:
            seen.append(problem.squared_gradient(x))
        x = x - lr * entry.reduced(simulation, state, problem.gradients(x, workers), lr)
    return torch.stack(seen).mean(0)


def fitted(xs: list[int], results: list[Tensor]) -> tuple[float, float]:
    """The slope of log result over log x: its mean over the rows, and the mean's deviation."""
    logs = torch.tensor(xs).log2()
    logs = (logs - logs.mean())[:, None]
    slopes = (logs * torch.stack(results).log2()).sum(0) / logs.square().sum()
    return slopes.mean().item(), slopes.std().item() / math.sqrt(ROWS)


def table(title: str, symbol: str, xs: list[int], results: dict[str, list[Tensor]]) -> None:
    print(f"\n{title}: mean squared gradient, times 1000\n")
    print(f"| method | {' | '.join(f'{symbol} = {x}' for x in xs)} | slope |")
    print("|---" * (len(xs) + 2) + "|")
    for name, found in results.items():
        mean, deviation = fitted(xs, found)
        cells = [f"{1e3 * row.mean():.1f}" for row in found]
        print(f"| {name} | {' | '.join(cells)} | {mean:.3f} ± {deviation:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="a folder for rates-light.png and rates-dark.png")
    args = parser.parse_args()
    if args.pictures:
        pictures.browser()  # before the long way to the picture
    torch.set_num_threads(1)
    bend = Regressions().least_curvature(torch.zeros(ROWS, COLUMNS))
    print(f"Non-convex where the runs start: the Hessian's least eigenvalue there is {bend:.3f}")
    by_length = {e.name: [run(e, TYPICAL_WORKERS, length) for length in LENGTHS] for e in ENTRIES}
    table(f"Steps T, {TYPICAL_WORKERS} workers", "T", LENGTHS, by_length)
    by_workers = {e.name: [run(e, workers, TYPICAL_LENGTH) for workers in WORKERS] for e in ENTRIES}
    table(f"Workers M, {TYPICAL_LENGTH} steps", "M", WORKERS, by_workers)
    print("\nSpeed-up by M workers: how many times fewer steps one needs for the same, (first / this)^2\n")
    print(f"| method | {' | '.join(f'M = {x}' for x in WORKERS)} |\n{'|---' * (len(WORKERS) + 1)}|")
    for name, found in by_workers.items():
        gains = [(found[0].mean() / one.mean()).square().item() for one in found]
        print(f"| {name} | {' | '.join(f'{gain:.1f}' for gain in gains)} |")
    examples = counterexamples.measure()
    counterexamples.table(examples)
    if args.pictures:
        svg = panels.page(
            [
                [
                    panels.Panel(
                        f"mean squared gradient, {TYPICAL_WORKERS} workers", "steps T", LENGTHS, means(by_length), -0.5
                    ),
                    panels.Panel(
                        f"mean squared gradient, {TYPICAL_LENGTH} steps", "workers M", WORKERS, means(by_workers), -0.5
                    ),
                ],
                [
                    panels.Panel(f"f = {name}", "steps", counterexamples.SEEN, curves)
                    for name, curves in examples.items()
                ],
            ]
        )
        pictures.shoot_all({"rates": svg}, args.pictures)


def means(results: dict[str, list[Tensor]]) -> dict[str, list[float]]:
    """Of what the theorem is about: the paper's scale."""
    return {name: [row.mean().item() for row in found] for name, found in results.items() if "relaxed" not in name}


if __name__ == "__main__":
    main()
