"""What a method keeps and what it needs in passing, against plain DDP.

    python -m benchmarks.memory [--workers 2] [--messages 1000] [--wrapped]

Each row is a fresh set of processes that train the same model. ``state`` is what ``sync.state_dict()`` holds. ``peak``
is the highest resident memory during the last steps, less that of plain DDP; what it exceeds the state by is scratch.
thinwire's methods have the module itself, or with ``--wrapped`` one under DDP.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from benchmarks import processes
from thinwire.core.rehearsal import rehearse
from thinwire.runtime.backward import SIZE

WIDTH, LAYERS = 1024, 12
BUCKET = {True: 4 << 20, False: SIZE}
"""Bytes, with DDP and without."""
METHODS = [None, "dense", "acp:rank=4", "powersgd:rank=4", "dist-ef-block", "dist-ef-block:momentum=0.9"]


def peak_memory(reset: bool = False) -> int:
    if reset:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def tensors(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(tensors(v) for v in value.values()) if isinstance(value, dict) else 0


def measure(rank: int, workers: int, spec: str | None, messages: int | None, wrapped: bool) -> tuple[int, int, int]:
    torch.manual_seed(0)
    for each in filter(None, METHODS):  # the compiler's own memory is no method's
        rehearse(tw.method(each), [torch.float32], torch.device("cpu"))
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if wrapped or not spec:
        model = DDP(model, bucket_cap_mb=BUCKET[True] >> 20, gradient_as_bucket_view=True)
    sync = tw.attach(model, spec, messages=messages) if spec else None
    for step in range(6):
        if step == 3:
            peak_memory(reset=True)
        model.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
    peak = peak_memory()
    return size, tensors(sync.state_dict()) if sync else 0, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--messages", type=int, help="at most so many a step; by default from latency and rate")
    parser.add_argument("--wrapped", action="store_true", help="under DDP")
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed tensors leave the resident set
    megabytes = BUCKET[args.wrapped] >> 20
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH}, buckets of {megabytes} MB, {args.workers} processes\n")
    print("| method | state, of the model | peak above DDP | scratch, in buckets |\n|---|---|---|---|")
    plain = 0
    for spec in METHODS:
        size, state, peak = processes.run(measure, args.workers, spec, args.messages, args.wrapped)
        plain = plain or peak
        scratch = (peak - plain - state) / BUCKET[args.wrapped]
        print(f"| `{spec or 'ddp'}` | {state / size:.2f}x | {(peak - plain) / size:.2f}x | {scratch:.1f} |", flush=True)


if __name__ == "__main__":
    main()
