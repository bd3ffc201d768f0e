"""DQ-SGD: how its bits run, and its loss against QSGD's at equal total bits.

    python -m benchmarks.quantised [--text FILE] [--images DIR] [--only text,images] [--seeds 5] [--decay]

Four simulated workers in one process (``benchmarks/simulated.py``): no network, but every byte is counted. The rate is
constant, as in the paper's analysis; ``--decay`` gives it the schedule of ``thinwire train``.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.simulated import Run, train

WORKERS, BITS, STEPS, ALPHA = 4, 3, 200, 0.985


class Watch:
    """The bits of each step as every worker has them, and the norm that they follow."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self._spent = [[0.0] * WORKERS]

    def __call__(self, sim: tw.Simulation, gradients: list[dict[str, Tensor]]) -> None:
        if sim.step:
            self.norms.append(2 ** sim.states[0][""].norm)
            self._spent.append([states[""].spent for states in sim.states])

    @property
    def bits(self) -> list[float]:
        return [after[0] - before[0] for before, after in zip(self._spent, self._spent[1:], strict=False)]

    @property
    def agreed(self) -> bool:
        return all(len(set(ranks)) == 1 for ranks in self._spent)


@dataclass(frozen=True)
class Case:
    workload: str
    data: Path | None
    lr: float
    decay: bool

    def qsgd(self, seed: int) -> Run:
        return self._train(f"qsgd:bits={BITS}", seed)

    def dq(self, seed: int, alpha: float = ALPHA) -> tuple[Run, Watch]:
        watch = Watch()
        return self._train(f"dq:budget={BITS},alpha={alpha},total_steps={STEPS}", seed, watch=watch), watch

    def _train(self, method: str, seed: int, **watching: Watch) -> Run:
        return train(method, self.workload, self.data, seed, STEPS, self.lr, decay=self.decay, **watching)


def show(case: Case, seeds: list[int]) -> None:
    rate = f"rate {case.lr}{', decaying' if case.decay else ''}"
    print(f"\n`{case.workload}`, {STEPS} steps, {rate}; `qsgd:bits={BITS}` and `dq:budget={BITS},alpha={ALPHA}`\n")
    print("| seed | `qsgd` | `dq` | difference | bits, of the budget | bytes, of `qsgd`'s |\n|---|---|---|---|---|---|")
    fixed, dynamic, watches = [], [], []
    for seed in seeds:
        fixed.append(case.qsgd(seed))
        run, watch = case.dq(seed)
        dynamic.append(run)
        watches.append(watch)
        cells = [seed, f"{fixed[-1].val_loss:.4f}", f"{run.val_loss:.4f}", f"{run.val_loss - fixed[-1].val_loss:+.4f}"]
        cells += [f"{statistics.fmean(watch.bits) / BITS - 1:+.2%}", f"{run.bytes_sent / fixed[-1].bytes_sent:.3f}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    gaps = [b.val_loss - a.val_loss for a, b in zip(fixed, dynamic, strict=True)]
    mean = [statistics.fmean(r.val_loss for r in runs) for runs in (fixed, dynamic)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    print(f"| mean | {mean[0]:.4f} | {mean[1]:.4f} | {statistics.fmean(gaps):+.4f} ± {error:.4f} | | |")
    train_loss = [statistics.fmean(r.train_loss for r in runs) for runs in (fixed, dynamic)]
    print(f"\nTraining loss of the last steps: `qsgd` {train_loss[0]:.4f}, `dq` {train_loss[1]:.4f}. ", end="")
    print(f"All workers chose alike at every step: {'yes' if all(w.agreed for w in watches) else 'NO'}.\n")
    course(case, seeds[0], watches[0])


def course(case: Case, seed: int, watch: Watch) -> None:
    _, by_norm = case.dq(seed, alpha=1.0)
    print(f"Seed {seed}:\n\n| of the run | norm | bits | norm, alpha=1 | bits, alpha=1 |\n|---|---|---|---|---|")
    for i in range(10):
        cells = []
        for each in (watch, by_norm):
            part = slice(len(each.norms) * i // 10, len(each.norms) * (i + 1) // 10)
            cells.append(f"{statistics.fmean(each.norms[part]):.3g} | {statistics.fmean(each.bits[part]):.2f}")
        print(f"| {10 * i}-{10 * i + 10} % | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file, in place of the Python standard library's source")
    parser.add_argument("--images", type=Path, help="a folder of MNIST files, in place of drawn digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--decay", action="store_true", help="the schedule of thinwire train")
    parser.add_argument("--only", default="text,images", help="which workloads")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = {
        "text": Case("lm:layers=1,width=64,context=32", args.text, 0.5, args.decay),
        "images": Case("image:width=4,batch=4", args.images, 0.1, args.decay),
    }
    for name in args.only.split(","):
        show(cases[name], list(range(args.first_seed, args.first_seed + args.seeds)))


if __name__ == "__main__":
    main()
