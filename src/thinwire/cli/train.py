"""``thinwire train``: a workload, a method, some workers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from thinwire.cli import launch
from thinwire.cli.output import check_writable
from thinwire.report.words import readable
from thinwire.workloads import training
from thinwire.workloads.training import Settings


@click.command()
@click.argument("method")
@click.option("--workload", default="lm", show_default=True, help="lm:layers=,width=,... or image:width=,...")
@click.option("--data", type=Path, help="A text file for lm; a folder of MNIST or CIFAR-10 files for image.")
@click.option("--workers", default=2, show_default=True, help="Processes on this machine; torchrun's under torchrun.")
@click.option("--steps", default=200, show_default=True, help="Optimizer steps.")
@click.option("--lr", type=float, help="Peak learning rate; by default the optimizer's usual one.")
@click.option("--seed", default=0, show_default=True, help="Of the model, the data and the method.")
@click.option("--messages", type=int, help="At most so many messages a step; by default from latency and rate.")
@click.option("--json", "json_path", type=Path, help="Write the figures to this file.")
@click.option("--save", type=Path, help="Write checkpoints to this folder.")
@click.option("--save-every", default=100, show_default=True, help="Steps from one checkpoint to the next.")
@click.option("--resume", type=Path, help="Go on from the latest checkpoint in this folder.")
@click.option("--trace", type=Path, help="Write a Chrome/Perfetto trace of the last steps to this file.")
def train(workers: int, json_path: Path | None, **options: Any) -> int:
    """Train a workload with METHOD and show loss, bytes and where the time went.

    METHOD is a method, an optimizer, or optimizer+method: see `thinwire methods`. Alone, the command starts its
    workers on this machine; under torchrun it is one of them.

    \b
    Examples:
      thinwire train acp:rank=4 --workload image --steps 300
      thinwire train apm:warmup_steps=100 --workload lm:layers=4,width=128 --workers 4
      thinwire train sgd+dist-ef-block --save run --json run.json --trace trace.json
      torchrun --nproc-per-node 2 -m thinwire train apm+acp:rank=16 --workload lm
    """
    settings = Settings(**options)
    for path in (json_path, settings.trace):
        check_writable(path)
    if launch.launched():
        return _work(settings, json_path)
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")
    settings.prepare()
    return launch.launch(sys.argv[1:], workers)


def _work(settings: Settings, json_path: Path | None) -> int:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    leads = dist.get_rank() == 0
    try:
        with _bar(settings, leads) as report:
            figures = training.train(settings, report)
        if leads:
            Console().print(_summary(figures))
            if not figures["warm_up_over"]:
                Console().print("[yellow]The warm-up outlasted the run: nothing was compressed.[/]")
            if json_path:
                json_path.write_text(json.dumps(figures))
    except BaseException:
        # peers may wait in a collective that this rank never joins: they see it go
        sys.stdout.flush()
        raise
    dist.destroy_process_group()
    return 0


@contextlib.contextmanager
def _bar(settings: Settings, visible: bool) -> Iterator[Callable[[training.Progress], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:.1f} steps/s  {task.fields[sent]}/step"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = not (visible and console.is_terminal)
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        task = progress.add_task(settings.method, total=settings.steps, loss=float("nan"), rate=0.0, sent="-")
        start, first = time.perf_counter(), 0

        def report(now: training.Progress) -> None:
            nonlocal first
            first = first or now.step - 1
            rate = (now.step - first) / (time.perf_counter() - start)
            sent = readable(now.bytes_sent)
            progress.update(task, completed=now.step, loss=now.loss, rate=rate, sent=sent)

        yield report


def _summary(f: dict[str, Any]) -> Table:
    table = Table(title=f"{f['method']} on {f['workload']}, {f['workers']} workers", show_header=False)
    table.add_row("parameters", f"{f['parameters']:,}")
    table.add_row("validation loss", f"{f['val_loss']:.4f}")
    if "val_accuracy" in f:
        table.add_row("validation accuracy", f"{100 * f['val_accuracy']:.2f} %")
    sent, dense = f["bytes_per_step"], f["dense_bytes_per_step"]
    table.add_row("sent per worker and step", f"{readable(sent)}, dense {readable(dense)}: {ratio(dense, sent)} less")
    table.add_row("  at the end", f"{readable(f['bytes_last_step'])}: {ratio(dense, f['bytes_last_step'])} less")
    parts = {"compute": f["compute_ms"], "compress": f["compress_ms"], "exposed communication": f["exposed_ms"]}
    table.add_row("step", f"{f['step_ms']:.1f} ms, of which")
    for name, ms in parts.items():
        table.add_row(f"  {name}", f"{ms:.1f} ms")
    table.add_row("  compression under backward", f"{f['hidden_compress_ms']:.1f} ms")
    return table


def ratio(dense: float, sent: float) -> str:
    return f"{dense / sent:.1f}x" if sent else "-"
