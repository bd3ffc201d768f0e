"""Where a step's processor time goes, thread by thread, in a lab whose hosts share this machine's cores.

    python -m benchmarks.profile [--hosts 4] [--rate 100mbit] [--steps 5] [--workload lm] [METHOD ...]

Every figure is a share of what `local` computes in the same run: `training` is the thread that runs forward, backward
and optimizer, `engine` thinwire's, `gloo` those of torch's transport, which also run torch's Power-SGD. `elapsed` is
the median step's. Hosts that share cores cannot hide one thread's work behind another's: all of it adds to the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.scaling import in_lab
from thinwire.workloads import load
from thinwire.workloads.contestant import SETTLING, Entry

METHODS = ["barrier", "acp:rank=4", "dist-ef-block", "torch-powersgd:rank=4"]
KINDS = ("training", "engine", "gloo")
TURNS = 2


def processor_seconds() -> Counter[str]:
    """Of this process so far, by kind of thread."""
    found: Counter[str] = Counter()
    for thread in Path("/proc/self/task").iterdir():
        try:
            nanoseconds, name = (thread / "schedstat").read_text().split()[0], (thread / "comm").read_text()
        except OSError:  # it has ended
            continue
        kind = "training" if int(thread.name) == os.getpid() else "gloo" if "gloo" in name else "engine"
        found[kind] += int(nanoseconds) / 1e9
    return found


def measure(methods: list[str], steps: int, workload_spec: str) -> None:
    """A host of the lab."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world, workload = dist.get_rank(), dist.get_world_size(), load(workload_spec, None, 0)
    horizon = SETTLING + TURNS * steps
    trainees = {name: Entry.parse(name, "adam").trainee(workload, None, 0, horizon) for name in methods}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    computed: dict[str, Counter[str]] = {name: Counter() for name in methods}
    for turn in range(1 + TURNS):
        for name, trainee in trainees.items():
            dist.barrier()
            before, taken = processor_seconds(), []
            for step in range(steps if turn else SETTLING):
                start = time.perf_counter()
                trainee.step(SETTLING * (turn > 0) + steps * max(0, turn - 1) + step, rank, world)
                taken.append(time.perf_counter() - start)
            if turn:
                seconds[name] += taken
                computed[name] += processor_seconds() - before
    if rank == 0:
        found = {name: [statistics.median(seconds[name]), computed[name]] for name in methods}
        print("found " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--steps", type=int, default=5, help="in each of two turns")
    parser.add_argument("--workload", default="lm")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        measure(args.methods, args.steps, args.workload)
        return
    methods = ["local", *(method for method in args.methods if method != "local")]
    options = ["--inside", "--steps", str(args.steps), "--workload", args.workload, *methods]
    found = in_lab(args.hosts, "profile", options, "--rate", args.rate)
    print(f"{args.workload}, {args.hosts} hosts at {args.rate} on {os.cpu_count()} cores\n")
    print("| method | elapsed | " + " | ".join(KINDS) + " |\n|" + "---|" * (len(KINDS) + 2))
    floor, base = found["local"][0], sum(found["local"][1].values())
    for method, (elapsed, threads) in found.items():
        shares = " | ".join(f"{100 * threads.get(kind, 0.0) / base:.1f} %" for kind in KINDS)
        print(f"| `{method}` | {elapsed / floor:.2f}x | {shares} |")


if __name__ == "__main__":
    main()
