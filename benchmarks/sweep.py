"""Where compression pays: `thinwire compare` in the lab, over models, rates and methods.

    python -m benchmarks.sweep [--only models,crossings,accuracy,apm] [--data MNIST] [--out DIR]

``models``: step times against plain DDP, and ACP-SGD against Power-SGD. ``crossings``: one model, rate by rate.
``accuracy``: dist-EF-blockSGDM's time to SGD's loss with 7 workers. ``apm``: APMSqueeze end to end, warm-up included. A
comparison found in ``--out`` is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS = {
    "wide MLP": "mlp:width=1024",
    "residual CNN": "image:width=32",
    "small GPT": "lm:layers=2,width=192",
    "GPT": "lm:layers=4,width=384",
}
RATES = ["100mbit", "300mbit", "1gbit"]
COMPRESSED = ["acp:rank=4", "powersgd:rank=4", "torch-powersgd:rank=4", "dist-ef-block"]


def compare(out: Path, methods: list[str], *options: str) -> tuple[dict[str, dict[str, Any]], str]:
    """The runs by method, and the command that gives them."""
    words = ["compare", *methods, *options]
    path = out / ("".join(c if c.isalnum() or c in "-_.=" else "-" for c in "_".join(words[1:])) + ".json")
    if not path.exists():
        print("$ thinwire", *words, file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "thinwire", *words, "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shown = ["PATH" if before == "--data" else word for before, word in zip(["", *words], words, strict=False)]
    return {run["method"]: run for run in json.loads(path.read_text())["runs"]}, f"`thinwire {' '.join(shown)}`"


def models(out: Path, data: list[str]) -> None:
    print("\nStep time of plain DDP over the method's: above 1 it is faster.\n")
    print("| model | rate | " + " | ".join(f"`{m}`" for m in COMPRESSED) + " | `local` | `acp` over `powersgd` |")
    print("|" + "---|" * (len(COMPRESSED) + 4))
    gains: list[float] = []
    over_power: list[float] = []
    command = ""
    for model, workload in MODELS.items():
        for rate in RATES:
            options = ["--workload", workload, "--hosts", "4", "--rate", rate, "--steps", "3", "--repeats", "2"]
            options += [] if workload.startswith("lm") else data
            runs, command = compare(out, ["ddp", "local", *COMPRESSED], *options)
            step = {method: run["step_ms"] for method, run in runs.items()}
            gains.append(step["ddp"] / step["acp:rank=4"])
            over_power.append(step["powersgd:rank=4"] / step["acp:rank=4"])
            cells = [f"{step['ddp'] / step[method]:.2f}x" for method in [*COMPRESSED, "local"]]
            print(f"| {model} | {rate} | {' | '.join(cells)} | {over_power[-1]:.2f}x |", flush=True)
    print(f"\nMean over all: `acp:rank=4` {statistics.fmean(gains):.2f}x over `ddp`, ", end="")
    print(f"{statistics.fmean(over_power):.2f}x over `powersgd:rank=4`. The last row: {command}")


def crossings(out: Path, data: list[str]) -> None:
    methods = ["ef-sign", "topk:ratio=0.01", "powersgd:rank=4", "acp:rank=4"]
    print("\nWhere compression stops to pay: step time of plain DDP over the method's, by rate.\n")
    print("| rate | " + " | ".join(f"`{m}`" for m in methods) + " | `local` |\n|" + "---|" * (len(methods) + 2))
    command = ""
    for rate in ["30mbit", "100mbit", "300mbit", "1gbit", "3gbit"]:
        options = ["--workload", "lm:layers=2,width=192", "--hosts", "4", "--rate", rate, "--steps", "4"]
        runs, command = compare(out, ["ddp", "local", *methods], *options, "--repeats", "2")
        step = {method: run["step_ms"] for method, run in runs.items()}
        cells = [f"{step['ddp'] / step[method]:.2f}x" for method in [*methods, "local"]]
        print(f"| {rate} | {' | '.join(cells)} |", flush=True)
    print(f"\nThe last row: {command}")


def accuracy(out: Path, data: list[str]) -> None:
    options = ["--workload", "image:width=16", "--hosts", "7", "--rate", "100mbit", "--target-loss", "0.1", *data]
    options += ["--steps", "200", "--repeats", "1", "--lr", "0.1"]
    runs, command = compare(out, ["sgd+ddp", "dist-ef-sgdm"], *options)
    print(f"\nTime to a training loss of 0.1, 7 workers: {command}\n")
    print("| method | steps | seconds, of plain DDP's | bytes, of plain DDP's | accuracy |\n|---|---|---|---|---|")
    base = runs["sgd+ddp"]
    for method, run in runs.items():
        if run["target_seconds"] is None:
            print(f"| `{method}` | not reached | | | {100 * run['val_accuracy']:.1f} % |")
            continue
        share = [f"{run[key] / base[key]:.3f}" for key in ("target_seconds", "target_bytes")]
        print(f"| `{method}` | {run['target_steps']} | {' | '.join(share)} | {100 * run['val_accuracy']:.1f} % |")


def apm(out: Path, data: list[str]) -> None:
    print("\nAPMSqueeze end to end, the dense warm-up of a fifth included, against Adam under plain DDP.\n")
    print("| rate | whole run | once compressed | validation loss, Adam | APMSqueeze |\n|---|---|---|---|---|")
    command = ""
    squeezed = "apm:warmup_steps=12,betas=0.9/0.98"
    for rate in RATES:
        options = ["--workload", "lm:layers=2,width=192", "--hosts", "4", "--rate", rate, "--lr", "0.004"]
        runs, command = compare(out, ["adam+ddp", squeezed], *options, "--steps", "60", "--repeats", "1")
        base, run = runs["adam+ddp"], runs[squeezed]
        whole, after = base["seconds"][-1] / run["seconds"][-1], base["step_ms"] / run["step_ms"]
        print(f"| {rate} | {whole:.2f}x | {after:.2f}x | {base['val_loss']:.3f} | {run['val_loss']:.3f} |", flush=True)
    print(f"\nThe last row: {command}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="models,crossings,accuracy,apm", help="which tables")
    parser.add_argument("--data", type=Path, help="a folder of MNIST or CIFAR-10 files, in place of drawn digits")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tables = {"models": models, "crossings": crossings, "accuracy": accuracy, "apm": apm}
    for name in args.only.split(","):
        tables[name](args.out, ["--data", str(args.data)] if args.data else [])


if __name__ == "__main__":
    main()
