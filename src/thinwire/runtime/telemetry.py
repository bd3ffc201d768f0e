"""Counters and spans of one worker's exchanges: the one place where bytes pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.core.lockstep import Collective


@dataclass(slots=True)
class Counters:
    """Since attach."""

    steps: int = 0
    bytes_sent: int = 0
    """By this worker."""
    bytes_dense: int = 0
    """What this worker would have sent uncompressed."""
    collectives: int = 0
    seconds_compressing: float = 0.0
    """Time that the engine spent computing."""
    seconds_communicating: float = 0.0
    """Time with a collective under way."""
    seconds_waiting: float = 0.0
    """Time from the end of backward's own work to the last answer."""
    seconds_exposed: float = 0.0
    """The part of that waiting in which the engine was not computing: communication that nothing hid."""


@dataclass(slots=True)
class Span:
    """Something that took time, on a named track."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


@dataclass(slots=True)
class Telemetry:
    """Counts always; keeps spans only while ``tracing``."""

    counters: Counters = field(default_factory=Counters)
    spans: list[Span] = field(default_factory=list)
    tracing: bool = False

    @contextmanager
    def compressing(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.counters.seconds_compressing += end - start
            self.span("compress", name, start, end)

    def communicated(self, collective: Collective, world: int, name: str, start: float, end: float) -> None:
        sent = collective.bytes_sent(world)
        self.counters.collectives += 1
        self.counters.bytes_sent += sent
        self.span("wire", f"{collective.op} {name}", start, end, bytes_sent=sent)

    def span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        if self.tracing:
            self.spans.append(Span(track, name, start, end, args))

    def stats(self) -> dict[str, Any]:
        return asdict(self.counters)
