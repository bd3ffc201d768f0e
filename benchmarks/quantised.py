"""DQ-SGD: how its bits run, and its loss against QSGD's at equal total bits.

    python -m benchmarks.quantised [--text FILE] [--images DIR] [--only lm-loss,image-bits] [--seeds 5] [--decay]

Four simulated workers in one process (``benchmarks/simulated.py``): no network, but every byte is counted. SGD without
momentum at a constant rate, and numbers rounded by the 2-norm of their tensor, as in the paper's analysis; ``--decay``
gives it the schedule of ``thinwire train``. A run that is found in ``--out`` is not repeated, so the command can be
stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.simulated import train
from thinwire.methods.dq import DQState

WORKERS, BITS, MOMENTUM = 4, 4, 0.0
ENDS = 20
"""Last models whose validation loss is averaged: at a constant rate one model is far from the next."""
SCALE = f"block={1 << 20},norm=2"
"""The 2-norm of each tensor, as both papers have it."""
LOSSES = ("val_loss", "train_loss")
TABLES = "lm-loss,lm-bits,image-loss,image-bits"
LM, IMAGE = "lm:layers=1,width=16,head=16,context=16,batch=8,clip=0", "mlp:layers=1,width=16,batch=32"


class Watch:
    """The bits of each step as every worker has them, a number's on average, and the norm of all tensors together."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self._spent = [[0.0] * WORKERS]

    def __call__(self, sim: tw.Simulation, gradients: list[dict[str, Tensor]]) -> None:
        chosen = {name: x.numel() for name, x in gradients[0].items() if isinstance(sim.states[0].get(name), DQState)}
        if chosen:
            self.norms.append(math.sqrt(sum(4 ** sim.states[0][name].norm for name in chosen)))
            of_all = [sum(states[name].spent * size for name, size in chosen.items()) for states in sim.states]
            self._spent.append([spent / sum(chosen.values()) for spent in of_all])

    def seen(self) -> dict[str, Any]:
        bits = [after[0] - before[0] for before, after in zip(self._spent, self._spent[1:], strict=False)]
        return {"bits": bits, "norms": self.norms, "agreed": all(len(set(ranks)) == 1 for ranks in self._spent)}


@dataclass(frozen=True)
class Case:
    workload: str
    data: Path | None
    lr: float
    steps: int
    target: float
    """For the paper's rule with one k: a few bits at the run's usual norms."""
    decay: bool
    out: Path

    def qsgd(self, bits: int = BITS) -> str:
        return f"qsgd:bits={bits},{SCALE}"

    @property
    def dq(self) -> str:
        return f"dq:budget={BITS},total_steps={self.steps},{SCALE}"

    @property
    def by_norm(self) -> str:
        return f"dq:target={self.target:g},alpha=1,total_steps={self.steps},{SCALE}"

    def run(self, method: str, seed: int) -> dict[str, Any]:
        rate = f"{self.lr:g}{'-decaying' if self.decay else ''}"
        words = [self.workload, method, f"rate={rate}", f"momentum={MOMENTUM:g}", f"steps={self.steps}", f"seed={seed}"]
        path = self.out / ("".join(c if c.isalnum() or c in "-_.=" else "-" for c in "_".join(words)) + ".json")
        if not path.exists():
            watch = Watch()
            options = {"decay": self.decay, "ends": ENDS, "watch": watch}
            run = train(method, self.workload, self.data, seed, self.steps, self.lr, MOMENTUM, WORKERS, **options)
            path.write_text(json.dumps(asdict(run) | watch.seen()))
        return json.loads(path.read_text())


def loss(case: Case, seeds: list[int]) -> None:
    rate = f"rate {case.lr}{', decaying' if case.decay else ''}"
    print(f"\n`{case.workload}`, {case.steps} steps, {rate}; `{case.qsgd()}` and `{case.dq}`\n")
    print("| seed | `qsgd` | `dq` | difference | bits, of the budget | bytes, of `qsgd`'s |\n|---|---|---|---|---|---|")
    pairs = []
    for seed in seeds:
        fixed, dynamic = case.run(case.qsgd(), seed), case.run(case.dq, seed)
        pairs.append((fixed, dynamic))
        losses = [fixed["val_loss"], dynamic["val_loss"]]
        cells = [seed, *(f"{loss:.4f}" for loss in losses), f"{losses[1] - losses[0]:+.4f}"]
        cells.append(f"{statistics.fmean(dynamic['bits']) / BITS - 1:+.2%}")
        cells.append(f"{dynamic['bytes_sent'] / fixed['bytes_sent']:.3f}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    ends = {}
    for what in LOSSES:
        before, after = ([run[what] for run in runs] for runs in zip(*pairs, strict=True))
        gaps = [b - a for a, b in zip(before, after, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else math.nan
        lower = sum(gap < 0 for gap in gaps)
        ends[what] = statistics.fmean(before), statistics.fmean(after), statistics.fmean(gaps), error, lower
    print("| mean | {:.4f} | {:.4f} | {:+.4f} ± {:.4f} | | |".format(*ends["val_loss"]))
    words = "`qsgd` {:.4f}, `dq` {:.4f}, difference {:+.4f} ± {:.4f}, lower on {}".format(*ends["train_loss"])
    agreed = all(dynamic["agreed"] for _, dynamic in pairs)
    print(f"\nTraining loss of the last steps: {words} of {len(pairs)} seeds. ", end="")
    print(f"All workers chose alike at every step: {'yes' if agreed else 'NO'}.")


def fixed(case: Case, seeds: list[int]) -> None:
    """Whether more bits, all along, are any use at this rate."""
    print(f"\n`{case.workload}`, {case.steps} steps, rate {case.lr}, seeds {seeds[0]} to {seeds[-1]}\n")
    print("| `qsgd`, bits | validation loss | training loss of the last steps |\n|---|---|---|")
    for bits in (3, 4, 8):
        runs = [case.run(case.qsgd(bits), seed) for seed in seeds]
        cells = [f"{statistics.fmean(run[what] for run in runs):.4f}" for what in LOSSES]
        print(f"| {bits} | {' | '.join(cells)} |", flush=True)


def bits(case: Case, seeds: list[int]) -> None:
    print(f"\n`{case.workload}`, rate {case.lr}, seed {seeds[0]}, budget: `{case.dq}`, target: `{case.by_norm}`\n")
    print("| of the run | norm, budget | bits, budget | norm, target | bits, target |\n|---|---|---|---|---|")
    runs = [case.run(case.dq, seeds[0]), case.run(case.by_norm, seeds[0])]
    for i in range(10):
        part = slice(len(runs[0]["norms"]) * i // 10, len(runs[0]["norms"]) * (i + 1) // 10)
        cells = [f"{statistics.fmean(r['norms'][part]):.3g} | {statistics.fmean(r['bits'][part]):.2f}" for r in runs]
        print(f"| {10 * i}-{10 * i + 10} % | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file, in place of the Python standard library's source")
    parser.add_argument("--images", type=Path, help="a folder of MNIST files, in place of drawn digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rates", default="", help="others than the usual, such as lm=0.5,image=0.1")
    parser.add_argument("--decay", action="store_true", help="the schedule of thinwire train")
    parser.add_argument("--only", default=TABLES, help="which tables; lm-fixed and image-fixed are others")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))
    rates = {"lm": 0.5, "image": 0.3} | dict(pair.split("=") for pair in args.rates.split(",") if pair)
    cases = {
        "lm": Case(LM, args.text, float(rates["lm"]), 800, 4.0, args.decay, args.out),
        "image": Case(IMAGE, args.images, float(rates["image"]), 1000, 8.0, args.decay, args.out),
    }
    for table in args.only.split(","):
        name, _, what = table.partition("-")
        {"loss": loss, "bits": bits, "fixed": fixed}[what](cases[name], seeds)


if __name__ == "__main__":
    main()
