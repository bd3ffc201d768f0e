"""What the hot loops cost, as multiples of copying the same tensor, on one thread.

    python -m benchmarks.kernels [--size 25000000] [--only acp,signs] [--json FILE]

A row is work that a method does in a step, through the functions that it does it with. Rounds of all rows, each beside
a copy, follow one another; a row's figure is the median over the rounds of its time over the copy's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.combine import error_feedback
from thinwire.core.lockstep import Lockstep, drive
from thinwire.core.method import Context, Method
from thinwire.core.value import Sum, write
from thinwire.methods.lowrank import Product, orthogonalize, product, transposed_product
from thinwire.methods.powersgd import PowerSGD

Work = Callable[[], None]
ROUNDS = 7


def rows(size: int) -> dict[str, tuple[float, Work]]:
    """By the work's name: the most that it should cost, and the work, on tensors of ``size`` numbers."""
    return lowrank_rows(size)


def lowrank_rows(size: int) -> dict[str, tuple[float, Work]]:
    """Whole steps of a worker, alone, at rank 4: one large matrix, and as many numbers in matrices of 1024 x 1024."""
    found = {}
    for side, what in [(math.isqrt(size), "one matrix"), (1024, "matrices of 1024 x 1024")]:
        gradients = [torch.randn(side, side) for _ in range(max(1, size // side**2))]
        errors = [torch.randn(side, side) for _ in gradients]
        P, Q = orthogonalize(torch.randn(2, side, 4))
        pairs = list(zip(gradients, errors, strict=True))
        steps = {
            "P": lambda M, Q=Q: Product(product(M, Q), Q),
            "Q": lambda M, P=P: Product(P, transposed_product(M, P)),
        }
        for turn, factors in steps.items():
            found[f"ACP {turn}-step, {what}"] = 2.5, partial(_low_rank_step, pairs, factors)
        found[f"P Q^T into the bucket, {what}"] = 1.2, partial(_reconstruct, gradients, Product(P, Q))
        power = error_feedback(PowerSGD())
        states = [power.init(x, Context())._replace(error=e) for x, e in pairs]
        found[f"Power-SGD, whole step, {what}"] = 5.0, partial(_power_step, power, gradients, states)
    return found


def _low_rank_step(pairs: Sequence[tuple[Tensor, Tensor]], factors: Callable[[Sum], Product]) -> None:
    for x, error in pairs:
        M = Sum(x, error, 1.0)
        factors(M).subtract(M, error)


def _reconstruct(buckets: Sequence[Tensor], value: Product) -> None:
    for out in buckets:
        value.write(out)


def _power_step(method: Method, gradients: Sequence[Tensor], states: Sequence[Any]) -> None:
    """The mean of one worker is its own factor."""
    for x, state in zip(gradients, states, strict=True):
        lockstep = Lockstep([method.reduce(x, state, Context())])
        drive(lockstep, lambda c: c.buffer)
        ((out, _),) = lockstep.results
        write(x, out.mean)


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(size: int, chosen: dict[str, tuple[float, Work]]) -> dict[str, float]:
    source, target = torch.randn(size), torch.empty(size)
    ratios: dict[str, list[float]] = {name: [] for name in chosen}
    for turn in range(ROUNDS + 1):
        for name, (_, work) in chosen.items():
            copy = min(seconds(lambda: target.copy_(source)) for _ in range(3))
            taken = seconds(work)
            if turn:  # the first compiles
                ratios[name].append(taken / copy)
    return {name: statistics.median(found) for name, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=25_000_000)
    parser.add_argument("--only", help="rows whose names have one of these words in them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    words = args.only.split(",") if args.only else [""]
    chosen = {name: row for name, row in rows(args.size).items() if any(word in name for word in words)}
    found = measure(args.size, chosen)
    print(f"{args.size:,} numbers in fp32, one thread\n")
    print("| work | x copy | at most |\n|---|---|---|")
    for name, (bar, _) in chosen.items():
        print(f"| {name} | {found[name]:.2f} | {bar:g} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
