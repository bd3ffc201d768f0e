"""ROOT-SGD beside the Cramer-Rao bound, and beside SGD and averaged SGD at equal numbers of gradients.

    python -m benchmarks.root [--only bound,rivals]

Linear regression with Gaussian features and noise of variance 1, by a stream of samples: the curvature H is known, the
gradient's covariance at the optimum is H too, and so the bound on n E (x - x*)(x - x*)' is H^-1. Many runs go side by
side, a row each. Far from the optimum the noise is in proportion to the distance.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from thinwire.optim import RootSGD

BURN_IN = 20

Rate = Callable[[int], float]


class Sample(NamedTuple):
    a: Tensor  # (runs, dimensions)
    y: Tensor  # (runs,)


class Problem(Protocol):
    def draw(self) -> Sample: ...

    def gradient(self, x: Tensor, sample: Sample) -> Tensor: ...


class Regression:
    """Its solution is 0; the curvatures go from 1 down to 1 / ``condition``."""

    def __init__(self, runs: int, dimensions: int, condition: float) -> None:
        self.H = torch.logspace(0, -math.log10(condition), dimensions, dtype=torch.float64)  # a diagonal
        self.shape = runs, dimensions
        self.generator = torch.Generator().manual_seed(0)

    def start(self, distance: float) -> Tensor:
        """That far away in every coordinate."""
        return torch.full(self.shape, distance, dtype=torch.float64)

    def draw(self) -> Sample:
        runs, dimensions = self.shape
        drawn = torch.randn(runs, dimensions + 1, generator=self.generator, dtype=torch.float64)
        return Sample(drawn[:, 1:] * self.H.sqrt(), drawn[:, 0])

    def gradient(self, x: Tensor, sample: Sample) -> Tensor:
        return sample.a * ((sample.a * x).sum(1) - sample.y)[:, None]


class Alone:
    """One worker, which averages with nobody."""

    def average(self, tensors: Mapping[Tensor, Tensor], exact: object = ()) -> dict[Tensor, Tensor]:
        return dict(tensors)

    def buffers(self) -> list[Tensor]:
        return []


def root_sgd(problem: Problem, start: Tensor, gradients: int, rate: Rate, epochs: int = 0, epoch: int = 1) -> Tensor:
    """The last iterate once that many gradients are spent; rates count from 1 in each epoch."""
    x = nn.Parameter(start.clone())
    opt = RootSGD([x], burn_in=BURN_IN, epochs=epochs, epoch=epoch)
    opt.workers = Alone()  # type: ignore[assignment]
    spent = 0
    for step in itertools.count():
        if spent >= gradients:
            return x.detach()
        sample = problem.draw()

        def closure(sample: Sample = sample) -> None:
            nonlocal spent
            spent += 1
            x.grad = problem.gradient(x.detach(), sample)

        opt.param_groups[0]["lr"] = rate(step - epoch * min(epochs, step // epoch) + 1)
        opt.step(closure)
    raise AssertionError


def sgd(
    problem: Problem, start: Tensor, gradients: int, rate: Callable[[int], float | Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The last iterate, the mean of all, and the mean of the later half."""
    x = start
    halves = [torch.zeros_like(x), torch.zeros_like(x)]
    for t in range(1, gradients + 1):
        x = x - rate(t) * problem.gradient(x, problem.draw())
        halves[2 * t > gradients].add_(x)
    return x, (halves[0] + halves[1]) / gradients, halves[1] / (gradients - gradients // 2)


def constant(lr: float) -> Rate:
    return lambda t: lr


def root_of_t(lr: float) -> Rate:
    return lambda t: min(0.2, lr / math.sqrt(t))


def one_over_t(lr: float, mu: float) -> Rate:
    """From lr to 2 / (mu t), the classical rate for a strong convexity mu, which has to be known."""
    return lambda t: lr / (1 + lr * mu * t / 2)


def by_theory(H: Tensor, lr: float) -> float:
    """The mean of the covariance's diagonal in units of the bound, at a constant rate.

    V = t v follows V' = (1 - lr A) V + g with A = a a', so its covariance is Q = E (1 - lr A) Q (1 - lr A) + H, and the
    noise of a step H + lr^2 E (A - H) Q (A - H). For Gaussian a, E A Q A = 2 H Q H + tr(HQ) H.
    """
    Q = H
    for _ in range(round(20 / (lr * H.min().item()))):
        Q = Q - 2 * lr * H * Q + lr**2 * (2 * H * Q * H + (H * Q).sum() * H) + H
    return (1 + lr**2 * (H * Q + (H * Q).sum())).mean().item()


def bound(n: int = 10_000, runs: int = 2000) -> None:
    print(f"\n4 coordinates, curvatures from 1 to 1/2, {runs} runs from a distance of 0.3, n = {n}:")
    print("n times the last iterate's covariance, in units of the bound\n")
    print("| rate | mean of the diagonal | by theory | farthest entry from the bound |\n|---|---|---|---|")
    for lr in (0.2, 0.1, 0.05, 0.01):
        problem = Regression(runs, 4, 2.0)
        white = root_sgd(problem, problem.start(0.3), 2 * n - BURN_IN, constant(lr)) * problem.H.sqrt()
        covariance = n * white.mT @ white / runs
        identity = torch.eye(len(covariance), dtype=torch.float64)
        farthest = ((covariance - identity).abs() / ((1 + identity) / runs).sqrt()).max()
        cells = f"{covariance.diagonal().mean():.3f} | {by_theory(problem.H, lr):.3f} | {farthest:.1f} deviations"
        print(f"| {lr:g} | {cells} |", flush=True)


def excess(problem: Regression, x: Tensor, gradients: int) -> float:
    return (gradients * (problem.H * x.square()).mean()).item()


def rivals(runs: int = 300, condition: float = 20.0) -> None:
    """Every method at its best rate of a grid, which is chosen on the very runs that are shown."""
    print(f"\n8 coordinates, curvatures from 1 to 1/{condition:g}, {runs} runs: loss above the minimum, in units of")
    print("the bound for one sample a gradient, and in brackets the rate\n")
    methods = ["ROOT-SGD", "ROOT-SGD, 2 short epochs", "SGD", "SGD, 1/t"]
    methods += ["averaged SGD", "averaged, 1/sqrt t", "averaged, 1/t"]
    print(f"| start | gradients | {' | '.join([*methods, 'mean of the later half'])} |\n{'|---' * 10}|")
    grid = [0.025, 0.05, 0.1, 0.2, 0.3]
    for distance, gradients in itertools.product([1.0, 30.0], [2000, 8000]):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in [*methods, "half"]}
        for lr in grid[:-1]:
            for name, epochs in zip(methods, (0, 2), strict=False):
                problem = Regression(runs, 8, condition)
                epoch = max(BURN_IN, round(condition / lr))
                x = root_sgd(problem, problem.start(distance), gradients, constant(lr), epochs, epoch)
                found[name].append((excess(problem, x, gradients), lr))
        rates = [(lr, constant(lr), "SGD", "averaged SGD") for lr in grid]
        rates += [(lr, root_of_t(lr), None, "averaged, 1/sqrt t") for lr in (0.3, 1.0, 3.0)]
        rates += [(lr, one_over_t(lr, 1 / condition), "SGD, 1/t", "averaged, 1/t") for lr in grid]
        for lr, rate, last, mean in rates:
            problem = Regression(runs, 8, condition)
            results = sgd(problem, problem.start(distance), gradients, rate)
            for name, x in zip((last, mean, "half"), results, strict=True):
                if name:
                    found[name].append((excess(problem, x, gradients), lr))
        cells = [f"{loss:.2f} ({lr:g})" for loss, lr in map(min, found.values())]
        print(f"| {distance:g} | {gradients} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bound,rivals")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "bound" in args.only:
        bound()
    if "rivals" in args.only:
        rivals()


if __name__ == "__main__":
    main()
