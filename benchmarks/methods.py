"""Every method on one small language model: bytes a step and final loss, for docs/methods.md.

    python -m benchmarks.methods [--only acp,topk] [--out docs/measured.json]

Trains with 4 workers over gloo, all methods in the same processes. Of two rates the one with the lower validation loss
on seed 0 is taken, or that of a kindred method; what is written is the run at that rate on seed 1. A row that the file
has already is not measured again, unless it is named.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import processes
from thinwire.workloads import load
from thinwire.workloads.contestant import Entry

WORKLOAD, WORKERS, STEPS = "lm:layers=1,width=64,context=32", 4, 200
LATE = 48
"""Last steps, past every warm-up and of whole periods, over which bytes are averaged."""


@dataclass(frozen=True)
class Row:
    name: str
    """Of the method or optimizer."""
    spec: str
    """What was trained, past its warm-up."""
    rates: tuple[float, float] = (0.4, 0.2)
    clip: float = 1.0
    """Largest norm of what the optimizer is given."""
    like: str = ""
    """The row whose rate it has."""


OWN = 10.0
"""For methods with a momentum of their own: 1 / (1 - 0.9) times the gradient's."""
ROWS = [
    Row("dense", "sgd"),
    Row("acp", "sgd+acp:rank=4"),
    Row("dist-ef-block", "sgd:momentum=0+dist-ef-block:momentum=0.9", clip=OWN),
    Row("topk", "sgd+topk:ratio=0.01"),
    Row("powersgd", "sgd+powersgd:rank=4", like="acp"),
    Row("ef-sign", "sgd+ef-sign", like="dist-ef-block"),
    Row("sign-mv", "sgd:momentum=0+sign-mv", (4e-3, 2e-3), clip=0),
    Row("qsgd", "sgd+qsgd:bits=4", like="dense"),
    Row("dgc", "sgd:momentum=0+dgc:ratio=0.01,warmup_steps=50", clip=OWN, like="dist-ef-block"),
    Row("gtopk", "sgd+gtopk:ratio=0.01", like="topk"),
    Row("sketch", "sgd:momentum=0+sketch:ratio=0.002,momentum=0.9", clip=OWN, like="dist-ef-block"),
    Row("gs", "sgd:momentum=0+gs:ratio=0.002,momentum=0.9", clip=OWN, like="sketch"),
    Row("randk", "sgd+randk:ratio=0.1", like="topk"),
    Row("dq", f"sgd+dq:budget=4,total_steps={STEPS}", like="dense"),
    Row("dist-ef", "sgd:momentum=0+dist-ef:momentum=0.9", clip=OWN, like="dist-ef-block"),
    Row("bf16", "sgd+bf16", like="dense"),
    Row("fp16", "sgd+fp16", like="dense"),
    Row("adam", "adam", (8e-3, 4e-3)),
    Row("apm", f"apm:warmup_steps={STEPS // 5},betas=0.9/0.98", like="adam"),
    Row("dist-ef-sgdm", f"dist-ef-sgdm+dist-ef-block:after={STEPS // 10}"),
    Row("slowmo", "slowmo:base=sgd", like="dense"),
    Row("local-sgd", "local-sgd:base=sgd", like="dense"),
    Row("bmuf", "bmuf:base=sgd", like="dense"),
    Row("gossip", "gossip:base=sgd,topology=exponential", like="dense"),
    Row("root-sgd", "root-sgd", (1.6, 0.8)),
]


def train(row: Row, lr: float, seed: int) -> dict[str, float]:
    """One run's figures, the same on every rank; every rank calls this."""
    workload = load(f"{WORKLOAD},clip={row.clip:g}", None, seed)
    trainee = Entry.parse(row.spec, "sgd").trainee(workload, lr, seed, STEPS)
    counters = trainee.telemetry.counters
    for step in range(STEPS):
        if step == STEPS - LATE:
            sent, dense = counters.bytes_sent, counters.bytes_dense
        trainee.step(step, dist.get_rank(), dist.get_world_size())
    late = {"bytes": (counters.bytes_sent - sent) / LATE, "dense": (counters.bytes_dense - dense) / LATE}
    whole = {"bytes_whole_run": counters.bytes_sent / STEPS}
    model = trainee.finish()
    figures = [workload.evaluate(model) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(figures)
    return {"lr": lr, "seed": seed, "loss": figures[0]["val_loss"], **late, **whole}


def rate_of(row: Row, measured: dict[str, Any]) -> float:
    if row.like:
        return float(measured[row.like]["lr"])
    losses = {rate: train(row, rate, seed=0)["loss"] for rate in row.rates}
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def measure(rank: int, _workers: int, rows: list[Row], out: str) -> None:
    for row in rows:
        start = time.perf_counter()
        figures = {"spec": row.spec} | train(row, rate_of(row, read(Path(out))["rows"]), seed=1)
        if rank == 0:
            content = read(Path(out))
            content["rows"][row.name] = figures
            Path(out).write_text(json.dumps(content, indent=1) + "\n")
            print(f"{row.name:14} {time.perf_counter() - start:5.0f} s  {figures}", flush=True)
        dist.barrier()  # the next row may need the rate of this one


def read(path: Path) -> dict[str, Any]:
    settings = {"workload": WORKLOAD, "workers": WORKERS, "steps": STEPS, "late": LATE}
    return settings | {"rows": json.loads(path.read_text())["rows"] if path.exists() else {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of rows to measure, again if need be")
    parser.add_argument("--out", type=Path, default=Path("docs/measured.json"))
    args = parser.parse_args()
    done = read(args.out)["rows"]
    named = args.only.split(",") if args.only else [row.name for row in ROWS if row.name not in done]
    processes.run(measure, WORKERS, [row for row in ROWS if row.name in named], str(args.out))


if __name__ == "__main__":
    main()
