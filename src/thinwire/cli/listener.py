"""What the workers of a comparison say while they run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from thinwire.workloads.comparison import EVENT, Plan


class Listener:
    """Hears the workers: keeps their results, shows how far they are and how long it will take."""

    def __init__(self, plan: Plan) -> None:
        self.runs: list[dict[str, Any]] = []
        self.error = ""
        self._plan = plan
        self._seconds: dict[str, list[float]] = {method: [] for method in plan.methods}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("starting", total=len(plan.methods) * plan.total, left="")

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        with self._bar:
            yield self

    def hear(self, rank: int, line: str) -> None:
        if not line.startswith(EVENT):
            self._bar.console.print(line, markup=False, highlight=False)
            return
        event = json.loads(line.removeprefix(EVENT))
        if "error" in event:
            self.error = self.error or event["error"]
        elif "result" in event:
            self.runs.append(event["result"])
            self._bar.update(self._task, description=f"validating {event['result']['method']}", left="")
        elif "ready" in event:
            self._bar.update(self._task, description=f"starting {event['ready']}")
        else:
            self._seconds[event["step"]].append(event["seconds"])
            done = sum(map(len, self._seconds.values()))
            self._bar.update(self._task, description=event["step"], completed=done, left=self._left())

    def _left(self) -> str:
        """A method that has not had a turn yet is expected to be as fast as the mean of those that have."""
        means = [statistics.fmean(taken) for taken in self._seconds.values() if taken]
        usual = statistics.fmean(means)
        left = sum(
            (self._plan.total - len(taken)) * (statistics.fmean(taken) if taken else usual)
            for taken in self._seconds.values()
        )
        return f"{int(left) // 60}:{int(left) % 60:02} left"
