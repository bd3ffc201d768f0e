"""ROOT-SGD beside SGD and its means where the loss is far from a parabola: logistic regression with a rare class.

    python -m benchmarks.rare [--starts share,zero] [--gradients 2000,8000,32000]

Seven features of either sign, in scales from 1 down to 1/10, and a ridge: 128 different samples, so that the minimum,
the curvature H and the noise S of a gradient are exact, and so is the bound on the loss above the minimum after n
samples, tr(H^-1 S) / 2n. One sample in a hundred is of the class. Its gradient is a hundred times the others', and
where that throws x the curvature is another: SGD's means have a bias in proportion to the rate.

Each method's rate, and how SGD's rate falls, is the best of a grid on one stream of samples; another one is shown.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.root import Sample, constant, root_sgd, sgd

INTERCEPT = -6.3
RIDGE = 1e-5
TUNING, SHOWN = 64, 400  # runs
RATES = [2 ** (k / 2) for k in range(-9, 7)]
ROOT_RATES = [2 ** (k / 2) for k in range(-6, 6)]
SHORT_EPOCH = 200
FALLING = list(itertools.product([1 / 2, 2 / 3, 3 / 4, 1.0], [64, 16, 4]))
MEANS = ["last iterate", "mean of all", "mean of the later half"]


class RareClass:
    """Many runs at once, a row each. x may have a dimension before that, for as many rates on the same samples."""

    def __init__(self, runs: int, seed: int) -> None:
        signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=7)), dtype=torch.float64)
        ones = torch.ones(len(signs), 1, dtype=torch.float64)
        self.a = torch.cat([ones, signs * torch.logspace(0, -1, 7, dtype=torch.float64)], 1)
        self.y = (INTERCEPT + signs.sum(1) * 2 / math.sqrt(7)).sigmoid()
        self.runs = runs
        self.generator = torch.Generator().manual_seed(seed)

        self.best = self.start("share")[0]
        for _ in range(50):
            self.best = self.best - torch.linalg.solve(self._curvature(), self._slope())
        self.H = self._curvature()
        each = self.a * ((self.a @ self.best).sigmoid() - self.y)[:, None] + RIDGE * self.best
        chance = (self.a.mT * (self.y * (1 - self.y))) @ self.a  # that of y, which each has at its mean
        self.S = (each.mT @ each + chance) / len(self.a)
        self.bound = torch.linalg.solve(self.H, self.S).trace().item() / 2

    def _slope(self) -> Tensor:
        return ((self.a @ self.best).sigmoid() - self.y) @ self.a / len(self.a) + RIDGE * self.best

    def _curvature(self) -> Tensor:
        p = (self.a @ self.best).sigmoid()
        return (self.a.mT * (p * (1 - p))) @ self.a / len(self.a) + RIDGE * torch.eye(len(self.best)).double()

    def start(self, where: str) -> Tensor:
        """Zero; or zero but for the intercept, which knows how rare the class is."""
        x = torch.zeros(self.runs, self.a.shape[1], dtype=torch.float64)
        if where == "share":
            x[:, 0] = torch.logit(self.y.mean())
        return x

    def draw(self) -> Sample:
        drawn = torch.randint(len(self.a), (self.runs,), generator=self.generator)
        coin = torch.rand(self.runs, generator=self.generator, dtype=torch.float64)
        return Sample(self.a[drawn], (coin < self.y[drawn]).double())

    def gradient(self, x: Tensor, sample: Sample) -> Tensor:
        return sample.a * ((sample.a * x).sum(-1).sigmoid() - sample.y)[..., None] + RIDGE * x

    def excess(self, x: Tensor, gradients: int) -> Tensor:
        """Of every run, in units of the bound for one sample a gradient."""
        return (self._loss(x) - self._loss(self.best)) * gradients / self.bound

    def _loss(self, x: Tensor) -> Tensor:
        logits = x @ self.a.mT
        return (softplus(logits) - self.y * logits).mean(-1) + RIDGE / 2 * x.square().sum(-1)

    def bias(self, lr: float, gradients: int) -> float:
        """The part of a bias in the excess of SGD's mean, at a small constant rate and once the start is forgotten.

        The covariance C of x solves H C + C H = lr S, and the mean slope is 0 where H b + f'''[C] / 2 = 0.
        """
        h, basis = torch.linalg.eigh(self.H)
        C = basis @ (lr * (basis.mT @ self.S @ basis) / (h[:, None] + h)) @ basis.mT
        p = (self.a @ self.best).sigmoid()
        third = p * (1 - p) * (1 - 2 * p) * ((self.a @ C) * self.a).sum(1)
        b = -torch.linalg.solve(self.H, third @ self.a / len(self.a)) / 2
        return (b @ self.H @ b / 2).item() * gradients / self.bound


class Falling:
    """lr min(1, (n / held / t)^power), for each of several rates; n gradients in all."""

    def __init__(self, rates: list[float], power: float, held: int, gradients: int) -> None:
        self.rates = torch.tensor(rates, dtype=torch.float64)[:, None, None]
        self.power = power
        self.begin = gradients / held

    def __call__(self, t: int) -> Tensor:
        return self.rates * min(1.0, self.begin / t) ** self.power


def measured(excess: Tensor) -> str:
    return f"{excess.mean():.2f} ± {excess.std() / math.sqrt(excess.numel()):.2f}"


def root(where: str, gradients: int, epochs: int) -> str:
    def excess(lr: float, runs: int, seed: int) -> Tensor:
        problem = RareClass(runs, seed)
        x = root_sgd(problem, problem.start(where), gradients, constant(lr), epochs, SHORT_EPOCH)
        return problem.excess(x, gradients)

    tuned = {lr: excess(lr, TUNING, 0).mean().nan_to_num(math.inf).item() for lr in ROOT_RATES}
    lr = min(ROOT_RATES, key=lambda rate: tuned[rate])
    return f"{measured(excess(lr, SHOWN, 1))} ({lr:.2g})"


def rivals(where: str, gradients: int) -> list[str]:
    """SGD's last iterate and means, each at a constant rate and at one that falls."""

    def excesses(rates: list[float], power: float, held: int, runs: int, seed: int) -> list[Tensor]:
        problem = RareClass(runs, seed)
        start = problem.start(where).expand(len(rates), -1, -1)
        found = sgd(problem, start, gradients, Falling(rates, power, held, gradients))
        return [problem.excess(x, gradients) for x in found]

    cells = []
    for schedules in ([(0.0, 1)], FALLING):
        tuned: list[list[tuple[float, float, float, int]]] = [[] for _ in MEANS]
        for power, held in schedules:
            for found, excess in zip(tuned, excesses(RATES, power, held, TUNING, 0), strict=True):
                means = excess.mean(1).nan_to_num(math.inf).tolist()
                found += [(mean, lr, power, held) for mean, lr in zip(means, RATES, strict=True)]
        for kind, found in enumerate(tuned):
            _, lr, power, held = min(found)
            seen = measured(excesses([lr], power, held, SHOWN, 1)[kind])
            cells.append(f"{seen} ({lr:.2g}{f', n/{held}, t^-{power:.2g}' if power else ''})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", default="share,zero")
    parser.add_argument("--gradients", default="2000,8000,32000")
    args = parser.parse_args()
    torch.set_num_threads(1)
    problem, n = RareClass(1, 0), 32_000
    h = torch.linalg.eigvalsh(problem.H)
    print(f"{problem.y.mean():.4f} of the samples are of the class; curvatures at the minimum from {h[-1]:.2g} down to")
    biases = ", ".join(f"{problem.bias(lr, n):.2f} at a rate of {lr:g}" for lr in (0.125, 0.25, 0.5))
    print(f"{h[0]:.2g}. Bias of SGD's mean by theory, n = {n}: {biases}")
    print("\nLoss above the minimum, in units of the bound for one sample a gradient; in brackets the rate, and from")
    print("which of the n gradients on it falls how\n")
    heads = [f"{name}, {rate} rate" for rate in ("constant", "falling") for name in MEANS]
    print(f"| start | gradients | ROOT-SGD | ROOT-SGD, a short epoch | {' | '.join(heads)} |\n{'|---' * 10}|")
    for where, gradients in itertools.product(args.starts.split(","), map(int, args.gradients.split(","))):
        cells = [root(where, gradients, epochs) for epochs in (0, 1)] + rivals(where, gradients)
        print(f"| {where} | {gradients} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
