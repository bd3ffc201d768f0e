"""What the hot loops cost, as multiples of copying the same tensor, on one thread.

    python -m benchmarks.kernels [--size 25000000] [--only acp,signs] [--json FILE]

A row is work that a method does in a step, through the functions that it does it with. Rounds of all rows, each beside a
copy, follow one another; a row's figure is the median over the rounds of its time over the copy's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

Work = Callable[[], None]
ROUNDS = 7


def rows(size: int) -> dict[str, tuple[float, Work]]:
    """By the work's name: the most that it should cost, and the work, on tensors of ``size`` numbers."""
    return {}


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
