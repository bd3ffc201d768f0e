"""Sketches: what they find, what they cost, how they end, and how fast they are.

    python -m benchmarks.sketches [--text FILE] [--only recall,size,loss,lab] [--seeds 3] [--first-seed 0] [--out DIR]

``recall`` and ``loss`` train four simulated workers in one process (``benchmarks/simulated.py``): no network, but every
byte is counted. ``lab`` is `thinwire compare` on 8 emulated hosts; a comparison found in ``--out`` is not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.simulated import train
from benchmarks.sweep import compare
from thinwire import kernels
from thinwire.workloads import load

LM = "lm:layers=2,width=64,context=32"


def recall(method: str, v: Tensor, k: int, seed: int) -> float:
    """The share of the k largest numbers of ``v`` that are found in its sketch."""
    out = tw.Simulation(method, 1, seed).reduce([{"v": v}])[0]["v"]
    return (out[kernels.top_k(v, k)[1]] != 0).double().mean().item()


def flat(tensors: list[dict[str, Tensor]]) -> Tensor:
    """The mean over the workers, as one vector."""
    return torch.stack([torch.cat([x.flatten() for x in each.values()]) for each in tensors]).mean(0)


def recalls(text: Path | None, seeds: list[int]) -> None:
    steps, moments = 121, (0, 10, 30, 60, 120)
    found: dict[tuple[int, str, str], list[float]] = {}

    def watch(sim: tw.Simulation, gradients: list[dict[str, Tensor]]) -> None:
        if sim.step not in moments:
            return
        mean = flat(gradients)
        error = torch.stack([states[""].error for states in sim.states]).mean(0) if sim.step else torch.zeros_like(mean)
        k = -(-len(mean) // 1000)
        for name in ("sketch", "gs"):
            for what, v in {"gradient": mean, "gradient + error": mean + error}.items():
                found.setdefault((sim.step, name, what), []).append(recall(name, v, k, sim.step))

    for seed in seeds:
        train("sketch", LM, text, seed, steps, 0.3, watch=watch)
    print(f"\nRecall of the true top k at the default size, `{LM}`, trained by `sketch`, mean of seeds {seeds}:\n")
    columns = [(name, what) for name in ("sketch", "gs") for what in ("gradient", "gradient + error")]
    print("| step | " + " | ".join(f"`{name}`, {what}" for name, what in columns) + " |\n|" + "---|" * 5)
    for step in moments:
        print(f"| {step} | " + " | ".join(f"{statistics.fmean(found[step, *c]):.2f}" for c in columns) + " |")


def sizes() -> None:
    d, methods = 1_000_000, ["sketch", "gs", "gtopk:ratio=0.001"]
    print("\nBytes of a worker's sketch, and how much less than a dense ring the busiest worker sends, d = 10^6:\n")
    print("| workers | the sketch | " + " | ".join(f"`{m}` sends" for m in methods) + " |\n|" + "---|" * 5)
    for workers in (2, 4, 8, 64, 256):
        sent = {m: [n for _, n in tw.price(m, {"w": (d,)}, workers)] for m in ["dense", *methods]}
        size = round(sent["sketch"][0] * workers / (2 * (workers - 1)))
        cells = [f"{sum(sent['dense']) / sum(sent[m]):.1f}x less" for m in methods]
        print(f"| {workers} | {size} | {' | '.join(cells)} |")


def losses(images: Path | None, seeds: list[int]) -> None:
    workload, steps, lr = "mlp:layers=1,width=48", 400, 0.05
    d = sum(p.numel() for p in load(workload, images, 0).model.parameters())
    print(
        f"\n`{workload}`, {steps} steps, rate {lr}, seeds {seeds}; all but `dense` have their momentum in the method:\n"
    )
    print("| method | validation loss | of dense | sent in all, less than dense |\n|---|---|---|---|")
    methods = ["dense", "topk:ratio=0.02", "sketch", "gs", *(sized(d, saving) for saving in (3, 10, 40))]
    base = None
    for method in methods:
        own = not method.startswith(("dense", "topk"))
        spec = f"{method}{',' if ':' in method else ':'}momentum=0.9" if own else method
        runs = [train(spec, workload, images, seed, steps, lr, momentum=0.0 if own else 0.9) for seed in seeds]
        loss, sent = statistics.fmean(r.val_loss for r in runs), runs[0].bytes_sent
        base = base or (loss, sent)
        print(f"| `{spec}` | {loss:.4f} | {100 * (loss / base[0] - 1):+.1f} % | {base[1] / sent:.1f}x |", flush=True)


def sized(d: int, saving: float) -> str:
    """gs-SGD that sends 1 / saving of d numbers, of which one in 17 is applied."""
    k = round(d / saving / 17)
    return f"gs:ratio={k / d:.5f},rows=3,cols={16 * k // 3}"


def lab(out: Path) -> None:
    methods = ["ddp", "gs", "gs:rows=3,cols=2048", "sketch", "gtopk:ratio=0.001"]
    options = [
        "--workload",
        "lm:layers=2,width=128",
        "--hosts",
        "8",
        "--rate",
        "100mbit",
        "--steps",
        "4",
        "--repeats",
        "2",
    ]
    runs, command = compare(out, methods, *options)
    print(f"\n8 hosts: {command}\n")
    print("| method | step, of `gs`'s | compressing, of its step | payload a step |\n|---|---|---|---|")
    for method, run in runs.items():
        share = 100 * (run["compress_ms"] + run["hidden_compress_ms"]) / run["step_ms"]
        relative = run["step_ms"] / runs["gs"]["step_ms"]
        print(f"| `{method}` | {relative:.2f} | {share:.0f} % | {run['payload_bytes_per_step'] / 1e3:.0f} kB |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file, in place of the Python standard library's source")
    parser.add_argument("--images", type=Path, help="a folder of MNIST files, in place of drawn digits")
    parser.add_argument("--only", default="recall,size,loss,lab", help="which tables")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))
    tables = {
        "recall": lambda: recalls(args.text, seeds),
        "size": sizes,
        "loss": lambda: losses(args.images, seeds),
        "lab": lambda: lab(args.out),
    }
    for name in args.only.split(","):
        tables[name]()


if __name__ == "__main__":
    main()
