"""Same loss? Every method against the uncompressed run of the same length, its rate from a small grid.

    python -m benchmarks.convergence [--text FILE] [--images DIR] [--only image,lm-sgd] [--out DIR]

Runs ``thinwire train`` with real workers over gloo. The learning rate is chosen on seed 0 and then kept for all seeds;
a run that is found in ``--out`` is not repeated, so the command can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

LM, IMAGE = "lm:layers=2,width=128", "image:width=8"
ADAM, SGD = [4e-3, 8e-3, 16e-3], [0.2, 0.4, 0.8]
IMAGE_ADAM = [8e-3, 16e-3, 32e-3]
RANK = 16
"""The largest power of two at which ACP sends ten times less than dense on that model; Power-SGD has half of it."""


@dataclass(frozen=True)
class Entry:
    method: str
    rates: list[float]
    """Tried on seed 0; the best is kept for the other seeds. Empty: the rate found for ``like``."""
    baseline: str | None = None
    seeds: int = 3
    like: str = ""


def apm(steps: int) -> str:
    """A fifth of the run as warm-up, and a v that remembers no more than that when it is frozen."""
    return f"apm:warmup_steps={steps // 5},betas=0.9/0.98"


def adam_entries(steps: int) -> list[Entry]:
    return [Entry("adam", ADAM), Entry(apm(steps), [], "adam", like="adam")]


def dist_ef(steps: int) -> str:
    """A tenth of the run dense: a transformer's first gradients are the most uneven, and one bit lags behind them."""
    return f"dist-ef-sgdm+dist-ef-block:after={steps // 10}"


def sgd_entries(steps: int) -> list[Entry]:
    return [
        Entry("sgd", SGD),
        Entry(dist_ef(steps), [], "sgd", like="sgd"),
        *(
            Entry(f"sgd+{factors}", [], "sgd", like="sgd")
            for factors in (f"acp:rank={RANK}", f"powersgd:rank={RANK // 2}")
        ),
    ]


def rank_entries(steps: int) -> list[Entry]:
    """The curve of rank, loss and bytes, under SGD and as the exchange of APMSqueeze."""
    factors = [("acp", rank) for rank in (4, 8, 16, 32)] + [("powersgd", rank) for rank in (4, 8, 16)]
    sgd = [Entry(f"sgd+{method}:rank={rank}", [], "sgd", seeds=1, like="sgd") for method, rank in factors]
    exchanged = [Entry(f"{apm(steps)}+acp:rank={rank}", [], "adam", seeds=1, like="adam") for rank in (4, 16, 32)]
    return [Entry("sgd", SGD, seeds=1), *sgd, Entry("adam", ADAM, seeds=1), *exchanged]


def image_entries(steps: int) -> list[Entry]:
    return [
        Entry("sgd", SGD),
        *(Entry(f"sgd+{method}", [], "sgd", like="sgd") for method in ("acp:rank=4", "powersgd:rank=4")),
        Entry("dist-ef-sgdm", SGD, "sgd"),
        Entry("adam", IMAGE_ADAM),
        Entry(apm(steps), [], "adam", like="adam"),
    ]


def run(out: Path, options: list[str], method: str, lr: float, seed: int) -> dict:
    name = "_".join([method, *options, f"{lr:g}", str(seed)])
    path = out / ("".join(c if c.isalnum() or c in "-_.=" else "-" for c in name) + ".json")
    if not path.exists():
        command = [sys.executable, "-m", "thinwire", "train", method, *options]
        command += ["--lr", f"{lr:g}", "--seed", str(seed), "--json", str(path)]
        print("$ thinwire", *command[3:-2], file=sys.stderr, flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())


def finite(loss: float) -> float:
    return loss if loss == loss else float("inf")


def measure(out: Path, options: list[str], entry: Entry) -> dict:
    tuned = {lr: run(out, options, entry.method, lr, 0) for lr in entry.rates}
    lr = min(tuned, key=lambda rate: finite(tuned[rate]["val_loss"]))
    runs = [tuned[lr], *(run(out, options, entry.method, lr, seed) for seed in range(1, entry.seeds))]
    losses = [r["val_loss"] for r in runs]
    return {
        "lr": lr,
        "loss": statistics.fmean(losses),
        "spread": statistics.stdev(losses) if len(losses) > 1 else None,
        "accuracy": statistics.fmean(r["val_accuracy"] for r in runs) if "val_accuracy" in runs[0] else None,
        "less": runs[0]["dense_bytes_per_step"] / runs[0]["bytes_per_step"],
        "less_after": runs[0]["dense_bytes_per_step"] / runs[0]["bytes_last_step"],
        "seeds": len(runs),
    }


def table(out: Path, title: str, options: list[str], entries: list[Entry]) -> None:
    shown = ["PATH" if before == "--data" else option for before, option in zip(["", *options], options, strict=False)]
    print(f"\n{title}: `thinwire train METHOD {' '.join(shown)}`\n")
    print("| method | lr | seeds | validation loss | against baseline | accuracy | bytes, whole run | after warm-up |")
    print("|---|---|---|---|---|---|---|---|")
    base: dict[str, dict] = {}
    for entry in entries:
        if entry.like:
            entry = replace(entry, rates=[base[entry.like]["lr"]])
        result = measure(out, options, entry)
        base[entry.method] = result
        reference = base[entry.baseline] if entry.baseline else None
        relative = f"{100 * (result['loss'] / reference['loss'] - 1):+.1f} %" if reference else "baseline"
        spread = f" ± {result['spread']:.3f}" if result["spread"] is not None else ""
        accuracy = f"{100 * result['accuracy']:.2f} %" if result["accuracy"] is not None else ""
        print(
            f"| `{entry.method}` | {result['lr']:g} | {result['seeds']} | {result['loss']:.4f}{spread} | {relative} "
            f"| {accuracy} | {result['less']:.1f}x less | {result['less_after']:.1f}x less |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file for a second language model")
    parser.add_argument("--images", type=Path, help="a folder of MNIST or CIFAR-10 files, in place of drawn digits")
    parser.add_argument("--only", help="which of lm-adam, lm-sgd, text-adam, text-sgd, rank, image")
    parser.add_argument("--lm", default=LM, help="the language model's workload")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--lm-steps", type=int, default=600)
    parser.add_argument("--sgd-steps", type=int, default=600)
    parser.add_argument("--image-steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    common = ["--workers", str(args.workers), "--steps"]
    adam = ["--workload", args.lm, *common, str(args.lm_steps)]
    sgd = ["--workload", args.lm, *common, str(args.sgd_steps)]
    images = [
        "--workload",
        IMAGE,
        *common,
        str(args.image_steps),
        *(["--data", str(args.images)] if args.images else []),
    ]
    text = ["--data", str(args.text)]
    library, other = "Python's standard library", "A text"
    tables = {
        "lm-adam": (f"{library}, Adam", adam, adam_entries(args.lm_steps)),
        "lm-sgd": (f"{library}, SGD", sgd, sgd_entries(args.sgd_steps)),
        "text-adam": (f"{other}, Adam", adam + text, adam_entries(args.lm_steps)),
        "text-sgd": (f"{other}, SGD", sgd + text, sgd_entries(args.sgd_steps)),
        "rank": ("Rank, loss and bytes", sgd + (text if args.text else []), rank_entries(args.sgd_steps)),
        "image": ("Images", images, image_entries(args.image_steps)),
    }
    for name in args.only.split(",") if args.only else tables:
        if args.text or not name.startswith("text"):
            table(args.out, *tables[name])


if __name__ == "__main__":
    main()
