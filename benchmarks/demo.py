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

WORKLOAD = "lm:layers=2,width=128"
STEPS, WORKERS = 150, 2
RUNS = [
    ("Adam", "adam+dense", 2e-3),
    ("APMSqueeze, 1 bit", "apm:warmup_steps=30", 6e-4),
    ("APMSqueeze, low rank", "apm:warmup_steps=30+acp:rank=16", 6e-4),
    ("SGD, Nesterov", "sgd+dense", 0.4),
    ("dist-EF-blockSGDM, 1 bit", "dist-ef-sgdm", 0.2),
    ("SGD with ACP-SGD, low rank", "sgd+acp:rank=4", 0.4),
]


def main() -> None:
    console = Console()
    table = Table(title=f"{WORKLOAD}, {WORKERS} workers, {STEPS} steps, on this machine's loopback")
    for column in ("method", "spec", "validation loss", "sent per step", "against dense", "after warm-up", "step"):
        table.add_column(column, justify="left" if column in ("method", "spec") else "right")
    slowest = None
    with tempfile.TemporaryDirectory() as folder:
        for title, method, lr in RUNS:
            console.print(f"[dim]$ thinwire train {method} --workload {WORKLOAD} --steps {STEPS} --lr {lr:g}[/]")
            figures = train(method, lr, Path(folder) / "figures.json")
            slowest = slowest or figures["step_ms"]
            dense = figures["dense_bytes_per_step"]
            table.add_row(
                title,
                method,
                f"{figures['val_loss']:.3f}",
                readable(figures["bytes_per_step"]),
                f"{ratio(dense, figures['bytes_per_step'])} less",
                f"{ratio(dense, figures['bytes_last_step'])} less",
                f"{figures['step_ms'] / slowest:.2f}x",
            )
    console.print(table)
    console.print(
        "Loopback is no thin wire: here compression can only cost time, and the step column says how much.\n"
        "What it saves on a slow network is in the bytes."
    )


def train(method: str, lr: float, path: Path) -> dict:
    command = [sys.executable, "-m", "thinwire", "train", method, "--workload", WORKLOAD, "--lr", f"{lr:g}"]
    command += ["--steps", str(STEPS), "--workers", str(WORKERS), "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
