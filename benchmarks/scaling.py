"""How costs grow: with the model, with the hosts, with the delay.

    python -m benchmarks.scaling [--only size,hosts,delay] [--pictures docs/pictures]

``size``: one worker and no network, so the processor time of a step is what engine and method compute; beside copying
the gradient once, in the same turn. ``hosts``: exchanges without training on 2, 4 and 8 hosts of a lab, beside what the
collectives' formulas say. ``delay``: training on 4 hosts with 20 ms between them, as thinwire chooses, against one
message in a ring, and against one for each of DDP's usual buckets of 25 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from benchmarks import pictures, processes
from thinwire.runtime.buckets import Bucket, Part
from thinwire.runtime.transport import Transport
from thinwire.workloads import load
from thinwire.workloads.wire import quiet_counter

WIDTH, MATRICES = 1024, 2
"""Of a layer, which is a million parameters, and how many of them fill a bucket of 8 MB."""
SIZES = [1, 3, 10, 30, 100]
COSTED = ["acp:rank=4", "powersgd:rank=4", "dist-ef-block", "dist-ef-block:momentum=0.9"]
HOSTS, RATE, DELAY = [2, 4, 8], "100mbit", "20ms"
BYTES_PER_SECOND = 100e6 / 8
SPREAD = ["dense", "acp:rank=4", "dist-ef-block", "topk:ratio=0.01"]
DELAYED = ["acp:rank=4", "dist-ef-block"]
EACH_BUCKET = 1000
TURNS, RESTED, STEPS = 4, 3, 4
"""Of a way to cut a step: the first turn does not count, nor do the first steps of the others."""
WAYS = {"a bucket of 25 MB": EACH_BUCKET, "one": 1, "chosen": None}


class Exchange:
    """A model's gradients, without the model's computing."""

    def __init__(self, spec: str, layers: int) -> None:
        model = nn.Module()
        for i in range(layers):
            model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(WIDTH, WIDTH)))
        self.sync = tw.Synchronizer(spec)
        self.sync.bind(Transport(dist.group.WORLD, torch.device("cpu")), model, False, False)
        self.buckets = []
        named = list(model.named_parameters())
        for start in range(0, layers, MATRICES):
            group = named[start : start + MATRICES]
            buffer = torch.randn(len(group) * WIDTH**2)
            parts = [Part(n, p, g) for (n, p), g in zip(group, buffer.view(-1, WIDTH, WIDTH), strict=True)]
            self.buckets.append(Bucket(len(self.buckets), parts, [buffer], start + MATRICES >= layers))

    def step(self) -> float:
        start = time.perf_counter()
        for future in [self.sync.reduce(bucket) for bucket in self.buckets]:
            future.wait()
        return time.perf_counter() - start


def cost(_rank: int, _workers: int) -> dict[str, list[tuple[int, float]]]:
    """Each method's step, in copies of the gradient, by the number of parameters."""
    print("| parameters | " + " | ".join(f"`{spec}`" for spec in COSTED) + " |\n|" + "---|" * (len(COSTED) + 1))
    rows: dict[str, list[tuple[int, float]]] = {spec: [] for spec in COSTED}
    for layers in SIZES:
        gradient = torch.randn(layers * WIDTH**2)
        copied = torch.empty_like(gradient)
        for spec in COSTED:
            exchange, ratios = Exchange(spec, layers), []
            exchange.step()
            for _ in range(2 if layers > 20 else 8):
                start = time.process_time()
                copied.copy_(gradient)
                middle = time.process_time()
                exchange.step()
                ratios.append((time.process_time() - middle) / (middle - start))
            rows[spec].append((gradient.numel(), statistics.median(ratios)))
        print(
            f"| {gradient.numel() / 1e6:.0f} M | " + " | ".join(f"{rows[spec][-1][1]:.1f}" for spec in COSTED) + " |",
            flush=True,
        )
    return rows


def size() -> dict[str, Any]:
    print("Processor time of a step of engine and method, no network, over that of copying the gradient:\n", flush=True)
    return processes.run(cost, 1)


def exchanging() -> None:
    """A host of the lab: bytes and seconds of a step, by method."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {}
    for spec in SPREAD:
        exchange = Exchange(spec, MATRICES)
        for _ in range(2):
            exchange.step()
        before, wire, seconds = exchange.sync.stats(), quiet_counter(), []
        for _ in range(4):
            dist.barrier()
            seconds.append(exchange.step())
        sent = (exchange.sync.stats()["bytes_sent"] - before["bytes_sent"]) / 4
        found[spec] = {"sent": sent, "wire": (quiet_counter() - wire) / 4, "seconds": statistics.median(seconds)}
    if dist.get_rank() == 0:
        print("found " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def hosts() -> dict[str, Any]:
    print(f"\nBytes and time of a step's exchange of {MATRICES * WIDTH**2 / 1e6:.1f} M parameters, hosts at {RATE}:\n")
    print("| method | hosts | sent by a host | by its interface | formula | time, of formula's bytes / rate |")
    print("|---|---|---|---|---|---|")
    found = {count: in_lab(count, "scaling", ["--inside", "exchanging"], "--rate", RATE) for count in HOSTS}
    shapes = {f"w{i}": (WIDTH, WIDTH) for i in range(MATRICES)}
    rows: dict[str, list[tuple[int, float, float, float]]] = {}
    for spec in SPREAD:
        for count in HOSTS:
            figures, formula = found[count][spec], _formula(spec, shapes, count)
            slower = figures["seconds"] / (formula / BYTES_PER_SECOND)
            megabytes = " | ".join(f"{size / 1e6:.3f} MB" for size in (figures["sent"], figures["wire"], formula))
            print(f"| `{spec}` | {count} | {megabytes} | {slower:.2f}x |")
            rows.setdefault(spec, []).append((count, figures["sent"], formula, figures["seconds"]))
    return rows


def _formula(spec: str, shapes: dict[str, tuple[int, int]], workers: int) -> float:
    """Written out again from the collectives' definitions, d numbers in all."""
    d, ring = sum(n * m for n, m in shapes.values()), 2 * (workers - 1) / workers
    if spec == "dense":
        return ring * 4 * d
    if spec == "acp:rank=4":
        return ring * 4 * sum(4 * n for n, _ in shapes.values())
    if spec == "dist-ef-block":  # a bit for each number and a scale for each 2048, both ways
        return ring * (d / 8 + 4 * d / 2048)
    assert spec == "topk:ratio=0.01"  # a value and an index
    return (workers - 1) * 8 * 0.01 * d


def delayed() -> None:
    """A host of the lab: step times of each way to cut a step, in turns.

    The first steps of a turn do not count: its connections have rested for all the others' turns, and start slowly.
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world, workload = dist.get_rank(), dist.get_world_size(), load("lm", None, 0)
    entries = []
    for spec in DELAYED:
        for messages in WAYS.values():
            model = load("lm", None, 0).model
            model = DDP(model, gradient_as_bucket_view=True) if messages == EACH_BUCKET else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            entries.append((spec, messages, model, optimizer, tw.attach(model, spec, optimizer, messages=messages)))
    seconds: list[list[float]] = [[] for _ in entries]
    counts = [0] * len(entries)
    for turn, (i, entry), step in product(range(TURNS), enumerate(entries), range(RESTED + STEPS)):
        _, _, model, optimizer, sync = entry
        dist.barrier()
        before, start = sync.stats()["collectives"], time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model, turn * (RESTED + STEPS) + step, rank, world).backward()
        optimizer.step()
        counts[i] = sync.stats()["collectives"] - before
        if turn and step >= RESTED:
            seconds[i].append(time.perf_counter() - start)
    if rank == 0:
        steps = [statistics.median(times) for times in seconds]
        found = [(entry[0], entry[1], count, step) for entry, count, step in zip(entries, counts, steps, strict=True)]
        print("found " + json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def delay() -> None:
    print(f"\nlm on 4 hosts at {RATE} with {DELAY} of delay:\n")
    print("| method | messages | collectives a step | least of all | step, of 25 MB buckets' |\n|---|---|---|---|---|")
    shapes = {name: tuple(p.shape) for name, p in load("lm", None, 0).model.named_parameters()}
    fixed = {}
    for spec, messages, count, step in in_lab(4, "scaling", ["--inside", "delayed"], "--rate", RATE, "--delay", DELAY):
        fixed.setdefault(spec, step)
        least = len(tw.price(spec, shapes, 4))
        how = next(name for name, given in WAYS.items() if given == messages)
        print(f"| `{spec}` | {how} | {count} | {least} | {step / fixed[spec]:.2f}x |")


def in_lab(hosts: int, benchmark: str, arguments: list[str], *options: str) -> Any:
    """What rank 0 of a benchmark found that runs on the hosts of a lab."""
    command = [sys.executable, "-m", "thinwire", "lab", "--hosts", str(hosts), *options, "--"]
    command += [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    out = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(next(line for line in out.splitlines() if "found " in line).partition("found ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="size,hosts,delay", help="which tables")
    parser.add_argument("--pictures", type=Path, help="draw into this folder")
    parser.add_argument("--inside", choices=["exchanging", "delayed"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        {"exchanging": exchanging, "delayed": delayed}[args.inside]()
        return
    drawn = {}
    for name in args.only.split(","):
        if name == "size":
            drawn["scaling-size"] = pictures.plot(size(), "parameters", "step, in copies of the gradient")
        elif name == "hosts":
            rows = hosts()
            sent = {spec: [(count, size / 1e6) for count, size, _, _ in points] for spec, points in rows.items()}
            said = {spec: [(count, size / 1e6) for count, _, size, _ in points] for spec, points in rows.items()}
            drawn["scaling-bytes"] = pictures.plot(sent, "hosts", "MB sent by a host; lines: the formula", said)
            took = {spec: [(count, seconds) for count, _, _, seconds in points] for spec, points in rows.items()}
            least = {spec: [(c, size / BYTES_PER_SECOND) for c, _, size, _ in points] for spec, points in rows.items()}
            drawn["scaling-time"] = pictures.plot(took, "hosts", "s of a step's exchange; lines: bytes / rate", least)
        else:
            delay()
    if args.pictures:
        pictures.shoot_all(drawn, args.pictures)


if __name__ == "__main__":
    main()
