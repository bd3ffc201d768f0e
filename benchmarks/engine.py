"""What the engine costs: each method's step against plain DDP's, turn by turn in one run.

    python -m benchmarks.engine [--workers 4] [--steps 12] [--workload lm:layers=4,width=384]

All methods train their own copy of the model on the same data and take turns, a step each, so noise hits all alike. A
row's ratio is the median over turns of its step's time over DDP's in the same turn. Unshaped loopback: what compression
saves on a slow wire is not shown here.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from benchmarks import processes
from thinwire.workloads import load

METHODS = ["dense", "fp16", "acp:rank=4", "powersgd:rank=4", "dist-ef-block", "dist-ef-block:momentum=0.9"]
WARM_UP = 3


def measure(rank: int, workers: int, workload_spec: str, steps: int) -> list[tuple[str, float, float, float]]:
    workload = load(workload_spec, None, 0)
    entries = []
    for spec in ["ddp", *METHODS]:
        model = DDP(copy.deepcopy(workload.model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = None if spec == "ddp" else tw.attach(model, spec, optimizer=optimizer)
        entries.append((spec, model, optimizer, sync))
    turns: list[dict[str, float]] = []
    for step in range(steps + WARM_UP):
        turn = {}
        for shift in range(len(entries)):
            spec, model, optimizer, _ = entries[(shift + step) % len(entries)]
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            workload.loss(model, step, rank, workers).backward()
            optimizer.step()
            turn[spec] = time.perf_counter() - start
        turns.append(turn)
    rows = []
    for spec, model, _, sync in entries:
        buckets = len(model.reducer._get_zeros_like_grad_buckets())
        ratio = statistics.median(turn[spec] / turn["ddp"] for turn in turns[WARM_UP:])
        collectives = sync.stats()["collectives"] / sync.stats()["steps"] / buckets if sync else 1.0
        less = sync.stats()["bytes_dense"] / sync.stats()["bytes_sent"] if sync else 1.0
        rows.append((spec, ratio, collectives, less))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workload", default="lm:layers=4,width=384")
    args = parser.parse_args()
    rows = processes.run(measure, args.workers, args.workload, args.steps)
    print(f"{args.workload}, {args.workers} processes, gloo on loopback, {args.steps} turns\n")
    print("| method | step, against DDP | collectives per bucket | bytes |\n|---|---|---|---|")
    for spec, ratio, collectives, less in rows:
        print(f"| `{spec}` | {ratio:.2f}x | {collectives:.1f} | {less:.1f}x less |")


if __name__ == "__main__":
    main()
