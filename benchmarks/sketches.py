"""Sketches: what they find, what they cost, how they end, and how fast they are.

    python -m benchmarks.sketches [--text FILE] [--images DIR] [--only recall,size,loss,lab] [--seeds 3]
        [--first-seed 0] [--out DIR]

``recall`` trains four simulated workers and ``loss`` two, in one process (``benchmarks/simulated.py``): no network, but
every byte is counted. ``rates``, on seeds of its own, is where the rates of ``loss`` come from. ``lab`` is `thinwire
compare` on 8 emulated hosts; a comparison found in ``--out`` is not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.simulated import Run, train
from benchmarks.sweep import compare
from thinwire import kernels
from thinwire.workloads import load

LM = "lm:layers=2,width=64,context=32"
MLP = "mlp:layers=1,width=16"
STEPS, IMAGES_A_STEP = 20_000, 4
RATES = (0.02, 0.03)
"""Of dense and of gs-SGD, by ``rates``."""


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


def small(d: int, saving: float) -> str:
    """gs-SGD that sends 1 / saving of d numbers: a quarter of them are the sketch, the others exact values.

    What is sketched has no tail, so even a large sketch would find little; more values make each coordinate wait less.
    """
    numbers, rows = int(d / saving), 3
    cols = numbers // 4 // rows
    return f"gs:ratio={(numbers - rows * cols - 0.5) / d:.6f},rows={rows},cols={cols}"


def loss_methods(images: Path | None) -> list[str]:
    d = sum(p.numel() for p in load(MLP, images, 0).model.parameters())
    return ["dense", small(d, 40)]


def rates(images: Path | None, seeds: list[int]) -> None:
    """On one worker with the batches of all: sketches are linear, so in law that is the same training."""
    print(f"\nValidation loss by rate, `{MLP},batch={IMAGES_A_STEP}`, one worker, {STEPS} steps, seeds {seeds}:\n")
    print("| method | rate | validation loss | of each seed |\n|---|---|---|---|")
    for method, grid in zip(loss_methods(images), ((0.01, 0.02, 0.03), (0.02, 0.03, 0.04)), strict=True):
        for lr in grid:
            spec = f"{MLP},batch={IMAGES_A_STEP}"
            found = [train(method, spec, images, seed, STEPS, lr, 0.0, workers=1).val_loss for seed in seeds]
            each = ", ".join(f"{x:.4f}" for x in found)
            print(f"| `{method}` | {lr} | {statistics.fmean(found):.4f} | {each} |", flush=True)


def losses(images: Path | None, seeds: list[int]) -> None:
    workers = 2
    spec = f"{MLP},batch={IMAGES_A_STEP // workers}"
    print(f"\n`{spec}`, {workers} workers, {STEPS} steps of plain SGD, rates from `--only rates`:\n")
    print("| seed | method | rate | validation loss | of dense | training loss | sent in all, less than dense |")
    print("|" + "---|" * 7)
    runs: dict[str, list[Run]] = {}
    methods = dict(zip(loss_methods(images), RATES, strict=True))
    for seed in seeds:
        for method, lr in methods.items():
            run = train(method, spec, images, seed, STEPS, lr, 0.0, workers=workers, tail=STEPS // 10)
            runs.setdefault(method, []).append(run)
            loss_row(str(seed), method, lr, runs["dense"][-1:], [run])
    for method, lr in methods.items():
        loss_row("mean", method, lr, runs["dense"], runs[method])
    _, sketched = runs.values()
    more = [r.val_loss - dense.val_loss for r, dense in zip(sketched, runs["dense"], strict=True)]
    spread = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else float("nan")
    print(f"\nMore than dense: {statistics.fmean(more):+.4f} ± {spread:.4f}, the standard error over seeds.")


def loss_row(seed: str, method: str, lr: float, dense: list[Run], runs: list[Run]) -> None:
    base, loss = (statistics.fmean(r.val_loss for r in each) for each in (dense, runs))
    saving = sum(r.bytes_sent for r in dense) / sum(r.bytes_sent for r in runs)
    figures = f"{loss:.4f} | {100 * (loss / base - 1):+.1f} % | {statistics.fmean(r.train_loss for r in runs):.4f}"
    print(f"| {seed} | `{method}` | {lr} | {figures} | {saving:.1f}x |", flush=True)


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
        "rates": lambda: rates(args.images, seeds),
        "loss": lambda: losses(args.images, seeds),
        "lab": lambda: lab(args.out),
    }
    for name in args.only.split(","):
        tables[name]()


if __name__ == "__main__":
    main()
