"""Train the same model with and without compression, on this machine, and compare.

python -m benchmarks.demo
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from thinwire.cli.train import ratio, readable

LM, IMAGE = "lm:layers=2,width=128", "image:width=8"
STEPS, WORKERS = 200, 2
FAMILIES = [
    [
        ("GPT, Adam", "adam", LM, 4e-3),
        ("GPT, APMSqueeze", "apm:warmup_steps=40", LM, 4e-3),
    ],
    [
        ("CNN, SGD", "sgd", IMAGE, 0.1),
        ("CNN, ACP-SGD, rank 4", "sgd+acp:rank=4", IMAGE, 0.1),
        ("CNN, dist-EF-blockSGDM", "dist-ef-sgdm", IMAGE, 0.05),
    ],
]


def main() -> None:
    console = Console(highlight=False)
    table = Table(title=f"{WORKERS} workers, {STEPS} steps, on this machine's loopback")
    for column in ("", "val.", "sent/step", "in all", "at last", "step"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            baseline = None
            for title, method, workload, lr in family:
                console.print(f"[dim]$ thinwire train {method} --workload {workload} --steps {STEPS} --lr {lr:g}[/]")
                figures = train(method, workload, lr, Path(folder) / "figures.json")
                baseline = baseline or figures["step_ms"]
                table.add_row(title, *row(figures, baseline))
            table.add_section()
    console.print(table)
    console.print(
        "val.: loss or accuracy. in all, at last: how many times less than fp32 was sent in the whole run, and at "
        "its end, past the warm-up. step: time against the uncompressed run. Loopback is no thin wire: here "
        "compression can only cost time. What it saves on a slow network is in the bytes."
    )


def row(figures: dict, baseline: float) -> tuple[str, ...]:
    accuracy, dense = figures.get("val_accuracy"), figures["dense_bytes_per_step"]
    return (
        f"{100 * accuracy:.1f} %" if accuracy is not None else f"{figures['val_loss']:.3f}",
        readable(figures["bytes_per_step"]),
        ratio(dense, figures["bytes_per_step"]),
        ratio(dense, figures["bytes_last_step"]),
        f"{figures['step_ms'] / baseline:.2f}x",
    )


def train(method: str, workload: str, lr: float, path: Path) -> dict:
    command = [sys.executable, "-m", "thinwire", "train", method, "--workload", workload, "--lr", f"{lr:g}"]
    command += ["--steps", str(STEPS), "--workers", str(WORKERS), "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
