"""SlowMo beside local SGD at the same period: which ends at the lower validation loss?

    python -m benchmarks.slow --text FILE --images DIR [--out DIR]

What ``thinwire train`` does, 4 workers over gloo, all runs in one group of processes. Each method's learning rate is
the best of three on seed 3; then come seeds 0, 1 and 2. All else is the default, a slow momentum of 0.5. A run that is
found in ``--out`` is not repeated, so the command can be stopped and started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

import torch.distributed as dist

from benchmarks import processes
from thinwire.workloads.training import Settings, train

WORKERS, PERIOD, STEPS = 4, 12, 300
TUNED_ON, SEEDS = 3, [0, 1, 2]
WORKLOADS = {"text": "lm:layers=1,width=64,context=32,batch=4", "images": "image:width=4,batch=8"}
BASES = {"plain": ("momentum=0", [0.5, 1.0, 2.0]), "Nesterov": ("momentum=0.9", [0.1, 0.2, 0.4])}
METHODS = ["local-sgd", "slowmo"]


def compare(rank: int, world: int, data: dict[str, Path], out: Path) -> None:
    for (base, (options, rates)), (workload, path) in itertools.product(BASES.items(), data.items()):
        found = {}
        for method in METHODS:
            spec = f"{method}:period={PERIOD},base=sgd,{options}"
            tuned = {lr: loss(rank, out, spec, workload, path, lr, TUNED_ON) for lr in rates}
            lr = min(rates, key=lambda rate: tuned[rate])
            found[method] = lr, [loss(rank, out, spec, workload, path, lr, seed) for seed in SEEDS]
        if rank == 0:
            print(row(workload, base, found), flush=True)


def loss(rank: int, out: Path, method: str, workload: str, data: Path, lr: float, seed: int) -> float:
    """On the validation set, the same on every rank."""
    path = out / f"slow_{method.replace(':', '-')}_{workload}_{STEPS}_{lr:g}_{seed}.json"
    dist.barrier()
    if not path.exists():
        settings = Settings(method=method, workload=WORKLOADS[workload], data=data, steps=STEPS, lr=lr, seed=seed)
        figures = train(settings, lambda progress: None)
        if rank == 0:
            path.write_text(json.dumps(figures))
        dist.barrier()
    value = json.loads(path.read_text())["val_loss"]
    return value if value == value else float("inf")


def row(workload: str, base: str, found: dict[str, tuple[float, list[float]]]) -> str:
    cells = [workload, base]
    for lr, losses in found.values():
        cells += [f"{lr:g}", f"{statistics.fmean(losses):.4f}: {', '.join(f'{one:.4f}' for one in losses)}"]
    local, slow = (losses for _, losses in found.values())
    lower = sum(mine < other for mine, other in zip(slow, local, strict=True))
    cells.append(
        f"{100 * (statistics.fmean(slow) / statistics.fmean(local) - 1):+.1f} %, lower in {lower} of {len(slow)}"
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--images", type=Path, required=True, help="a folder of MNIST files")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{WORKERS} workers, {STEPS} steps, averages every {PERIOD}: {', '.join(WORKLOADS.values())}\n")
    head = ["workload", "base", "lr", "local SGD: seeds", "lr", "SlowMo: seeds", "SlowMo against it"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    processes.run(compare, WORKERS, {"text": args.text, "images": args.images}, args.out)


if __name__ == "__main__":
    main()
