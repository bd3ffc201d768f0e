"""``thinwire lab``: any command on an emulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from thinwire import lab as emulated
from thinwire.lab.check import USUAL, Reading, check


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--hosts", default=2, show_default=True, help="Hosts, up to 254.")
@click.option("--rate", help="Of each link, both ways: 100mbit for all, 100mbit,10mbit,... for each. Else unshaped.")
@click.option("--delay", help="One way, on arrival at a host: 5ms, or one for each.")
@click.option("--loss", help="Share of the packets lost on arrival at a host: 0.1%, or one for each.")
@click.option("--preset", help=f"Usual figures for what is not given: {', '.join(emulated.PRESETS)}.")
@click.option("--per-host", default=1, show_default=True, help="Processes on each host.")
@click.option(
    "--event", "events", multiple=True, help="While it runs: 10s:host2:down, 20s:host2:up, 30s:all:rate=10mbit."
)
@click.option("--check", "checks", is_flag=True, help="Measure what the links deliver; usual rates if none is given.")
def lab(command: Sequence[str], checks: bool, **words: Any) -> int:
    """Run COMMAND on every host of an emulated cluster on this machine, as torchrun would.

    A host is a network namespace with an address of its own. Its link has the rate, delay and loss you give it. No root
    is needed, and nothing stays behind. The exit code is that of the first host that fails; the others are then ended.

    \b
    Examples:
      thinwire lab --hosts 4 --rate 100mbit -- python train.py
      thinwire lab --hosts 4 --rate 100mbit,100mbit,10mbit,1gbit --delay 5ms -- thinwire train acp:rank=4
      thinwire lab --preset home --per-host 2 --event 10s:host1:down --event 13s:host1:up -- python train.py
      thinwire lab --check
    """
    cluster = emulated.cluster(**words)
    if not checks:
        return emulated.run(cluster, command)
    if command:
        raise ValueError("--check takes no command")
    given = words["rate"] or words["delay"] or words["loss"] or words["preset"]
    clusters = [cluster] if given else [replace(cluster, links=(link,) * words["hosts"]) for link in USUAL]
    console = Console()
    with console.status("measuring"):
        readings = [reading for each in clusters for reading in check(each)]
    console.print(_table(readings))
    return 0 if all(reading.holds for reading in readings) else 1


def _table(readings: list[Reading]) -> Table:
    table = Table("link", "rate", "measured", "delay", "measured", "", title="What the links deliver")
    for r in readings:
        table.add_row(
            f"host{r.sender} to host{r.receiver}",
            "unshaped" if r.rate is None else f"{r.rate / 1e6:g} Mb/s",
            f"{r.measured_rate / 1e6:.1f} Mb/s",
            f"{1e3 * r.delay:g} ms",
            f"{1e3 * r.measured_delay:.2f} ms",
            "holds" if r.holds else "[red]off[/]",
        )
    return table
