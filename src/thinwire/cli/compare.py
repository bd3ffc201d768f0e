"""``thinwire compare``: several methods, one workload, one network, one table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from thinwire import lab
from thinwire.cli import launch
from thinwire.cli.listener import Listener
from thinwire.cli.output import check_writable
from thinwire.errors import ExchangeError
from thinwire.report import words
from thinwire.report.page import page
from thinwire.workloads.comparison import Plan


@click.command()
@click.argument("methods", nargs=-1)
@click.option("--workload", default="lm", show_default=True, help="lm:..., image:... or mlp:..., as in train.")
@click.option("--data", help="A text file for lm; a folder of MNIST or CIFAR-10 files for image and mlp.")
@click.option("--hosts", default=4, show_default=True, help="Hosts of the lab; workers without one.")
@click.option("--per-host", default=1, show_default=True, help="Workers on each host of the lab.")
@click.option("--rate", help="Of the lab's links, such as 100mbit, or one for each host. Without: plain loopback.")
@click.option("--delay", help="Of the lab's links, one way, such as 5ms.")
@click.option("--loss", help="Of the lab's links, such as 0.1%.")
@click.option("--preset", help="A network with a name: see `thinwire lab --help`.")
@click.option("--steps", default=40, show_default=True, help="Timed steps in each turn of a method.")
@click.option("--repeats", default=3, show_default=True, help="Turns of each method; they alternate.")
@click.option("--target-loss", type=float, help="Measure the time to this training loss instead of to a step.")
@click.option("--lr", type=float, help="Peak learning rate; by default each optimizer's usual one.")
@click.option("--seed", default=0, show_default=True, help="Of the model, the data and the methods.")
@click.option("--messages", type=int, help="At most so many messages a step; by default from latency and rate.")
@click.option("--json", "json_path", type=Path, help="Write all figures to this file.")
@click.option("--report", "report_path", type=Path, help="Write a page with charts to this file.")
def compare(
    methods: Sequence[str],
    hosts: int,
    per_host: int,
    rate: str | None,
    delay: str | None,
    loss: str | None,
    preset: str | None,
    json_path: Path | None,
    report_path: Path | None,
    **options: Any,
) -> int:
    """Train METHODS side by side, on the same data from the same start, and show what each costs and gains.

    A method is what `thinwire train` takes, or a baseline: ddp (plain DDP), torch-powersgd (torch's own hook), local
    (no communication: the floor) or barrier (no communication, but in step). They take turns, so that noise hits all
    alike. With a rate, a delay, a loss or a preset they run in a lab (see `thinwire lab`), else over this machine's
    loopback.

    \b
    Examples:
      thinwire compare ddp local acp:rank=4 --hosts 4 --rate 100mbit --report report.html
      thinwire compare ddp torch-powersgd:rank=4 powersgd:rank=4 --workload mlp --rate 1gbit --json out.json
      thinwire compare ddp apm:warmup_steps=100 --preset wan --target-loss 2.5 --steps 400 --repeats 1
    """
    shaped = any(word is not None for word in (rate, delay, loss, preset))
    cluster = lab.cluster(hosts, rate, delay, loss, per_host, preset=preset)
    plan = Plan(methods=list(methods), sharing=per_host if shaped else cluster.world, **options)
    workload, _ = plan.prepare()
    check_writable(json_path)
    check_writable(report_path)
    if shaped and (reason := lab.missing()):
        raise ValueError(reason)
    setting = _setting(plan, cluster, shaped) | {"parameters": sum(p.numel() for p in workload.model.parameters())}
    command = [sys.executable, "-m", "thinwire.workloads.comparison", json.dumps(asdict(plan))]
    with Listener(plan).listening() as listener:
        if shaped:
            # hosts of a lab have no names to look up, which torch would complain about
            code = lab.run(cluster, command, listener.hear, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
        else:
            code = launch.run(command, cluster.world, listener.hear)
    if code or len(listener.runs) < len(methods):
        raise ExchangeError(listener.error or f"a worker ended with exit code {code}")
    comparison = {"runs": listener.runs, "setting": setting}
    console = Console(highlight=False)
    console.print((_table if plan.target_loss is None else _target_table)(listener.runs, setting))
    for sentence in [*words.verdict(listener.runs, setting), *words.notes(listener.runs)]:
        console.print(sentence)
    if json_path:
        json_path.write_text(json.dumps(comparison))
    if report_path:
        report_path.write_text(page(comparison), encoding="utf-8")
        console.print(f"Report: {report_path}")
    return 0


def _setting(plan: Plan, cluster: lab.Cluster, shaped: bool) -> dict[str, Any]:
    named = {name: value for name, value in asdict(plan).items() if name not in ("methods", "sharing")}
    return named | {
        "shaped": shaped,
        "hosts": len(cluster.links) if shaped else 1,
        "per_host": cluster.per_host if shaped else cluster.world,
        "workers": cluster.world,
        "rates": [link.rate for link in cluster.links],
        "delays": [link.delay for link in cluster.links],
        "losses": [link.loss for link in cluster.links],
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "thinwire": importlib.metadata.version("thinwire"),
        "command": shlex.join(["thinwire", *sys.argv[1:]]),
    }


def _table(runs: Sequence[words.Run], setting: Mapping[str, Any]) -> Table:
    table = _titled(setting)
    for column in ("step", "vs ddp", "vs local", "wire/step", "loss", "val. loss"):
        table.add_column(column, justify="right", no_wrap=True)
    ddp, floor = words.first(runs, "ddp"), words.first(runs, "local")
    for run in runs:
        table.add_row(
            run["method"],
            words.duration(run["step_ms"]),
            words.times(ddp["step_ms"] / run["step_ms"]) if ddp else "-",
            words.times(run["step_ms"] / floor["step_ms"]) if floor else "-",
            words.readable(run["wire_bytes_per_step"]),
            f"{run['train_loss']:.3f}",
            f"{run['val_loss']:.3f}",
        )
    return table


def _target_table(runs: Sequence[words.Run], setting: Mapping[str, Any]) -> Table:
    table = _titled(setting)
    for column in (f"to loss {setting['target_loss']:g}", "steps", "sent", "step", "loss", "val. loss"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        there = run["target_seconds"] is not None
        table.add_row(
            run["method"],
            words.duration(1e3 * run["target_seconds"]) if there else "not reached",
            str(run["target_steps"]) if there else "-",
            words.readable(run["target_bytes"]) if there else "-",
            words.duration(run["step_ms"]),
            f"{run['train_loss']:.3f}",
            f"{run['val_loss']:.3f}",
        )
    return table


def _titled(setting: Mapping[str, Any]) -> Table:
    title = f"{setting['workload']}, {setting['parameters']:,} parameters, {words.place(setting)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", overflow="fold")
    return table
