"""What a cluster is: the links of its hosts, and what happens to them. Words in, checked numbers out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SHARES = {"%": 0.01}
MAX_HOSTS = 254
"""The addresses of 10.77.0.0/24."""


@dataclass(frozen=True, slots=True)
class Link:
    """What joins a host to the others. The rate holds both ways; delay and loss befall what arrives at the host."""

    rate: float | None
    """Bits per second; None is unshaped."""
    delay: float = 0.0
    """Seconds one way."""
    loss: float = 0.0
    """The share of packets lost."""

    def __post_init__(self) -> None:
        if self.rate is not None and not 1e3 <= self.rate <= 1e11:
            raise ValueError(f"a rate must be from 1kbit to 100gbit, not {self.rate:g}bit")
        if not 0 <= self.delay <= 10:
            raise ValueError(f"a delay must be from 0s to 10s, not {self.delay:g}s")
        if not 0 <= self.loss < 1:
            raise ValueError(f"a loss must be from 0% to below 100%, not {100 * self.loss:g}%")


@dataclass(frozen=True, slots=True)
class Event:
    """A change while the job runs: a link goes down or up, or takes another rate or delay."""

    at: float
    """Seconds after the job's start."""
    host: int | None
    """None is all of them."""
    change: str
    """``down``, ``up``, ``rate`` or ``delay``."""
    value: float | None = None
    """The new rate or delay."""

    @classmethod
    def parse(cls, text: str) -> Event:
        """From ``10s:host2:down``, ``20s:host2:up``, ``30s:all:rate=10mbit`` or ``30s:all:delay=20ms``."""
        match = re.fullmatch(r"([^:]+):(?:all|host(\d+)):(?:(down|up)|(rate|delay)=([^:]+))", text.strip())
        if not match:
            raise ValueError(f"{text!r} is no event: write 10s:host2:down, 20s:host2:up or 30s:all:rate=10mbit")
        at, host, state, name, value = match.groups()
        units = RATES if name == "rate" else TIMES
        new = None if state else _quantity(name, value, units)
        event = cls(_quantity("time", at, TIMES), None if host is None else int(host), state or name, new)
        Link(rate=new if name == "rate" else None, delay=new or 0.0 if name == "delay" else 0.0)
        return event


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts by their links, processes on each, and what happens while a job runs."""

    links: tuple[Link, ...]
    per_host: int = 1
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        hosts = len(self.links)
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"there can be 1 to {MAX_HOSTS} hosts, the addresses of 10.77.0.0/24, not {hosts}")
        if self.per_host < 1:
            raise ValueError(f"per-host must be at least 1, not {self.per_host}")
        for event in self.events:
            if event.host is not None and event.host >= hosts:
                raise ValueError(f"an event is for host{event.host}, but the last host is host{hosts - 1}")

    @property
    def world(self) -> int:
        return len(self.links) * self.per_host


PRESETS: Mapping[str, Link] = {
    "home": Link(rate=50e6, delay=10e-3, loss=1e-4),
    "wan": Link(rate=200e6, delay=25e-3),
    "ethernet": Link(rate=1e9, delay=100e-6),
    "cloud": Link(rate=5e9, delay=100e-6),
}
"""Broadband between homes; data centres of one continent; a gigabit switch; small instances in one zone."""


def cluster(
    hosts: int,
    rate: str | None,
    delay: str | None = None,
    loss: str | None = None,
    per_host: int = 1,
    events: Sequence[str] = (),
    preset: str | None = None,
) -> Cluster:
    """A cluster from words such as ``100mbit``, ``5ms`` and ``0.1%``: one for all hosts, or one for each, by commas.

    ``preset`` gives what the others leave out. Raises ``ValueError`` for whatever is wrong.
    """
    if not 1 <= hosts <= MAX_HOSTS:
        Cluster(links=(Link(None),) * max(0, min(hosts, MAX_HOSTS + 1)))
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    usual = PRESETS[preset] if preset else Link(None)
    rates = _each(hosts, "rate", rate, RATES) or [usual.rate] * hosts
    delays = _each(hosts, "delay", delay, TIMES) or [usual.delay] * hosts
    losses = _each(hosts, "loss", loss, SHARES) or [usual.loss] * hosts
    links = tuple(Link(*each) for each in zip(rates, delays, losses, strict=True))
    return Cluster(links, per_host, tuple(sorted(map(Event.parse, events), key=lambda event: event.at)))


def _each(hosts: int, what: str, text: str | None, units: Mapping[str, float]) -> list[float]:
    if text is None:
        return []
    values = [_quantity(what, word, units) for word in text.split(",")]
    if len(values) not in (1, hosts):
        raise ValueError(f"{what} {text!r} has {len(values)} values for {hosts} hosts")
    return values * (hosts // len(values))


def _quantity(what: str, text: str, units: Mapping[str, float]) -> float:
    match = re.fullmatch(r"\s*(-?\d*\.?\d+)\s*([a-z%]+)\s*", text.lower())
    if not match or match[2] not in units:
        raise ValueError(f"{what} {text!r} is not a number with one of the units {', '.join(units)}")
    value = float(match[1]) * units[match[2]]
    if value < 0 or (units is RATES and value == 0) or not math.isfinite(value):
        raise ValueError(f"{what} must be {'above' if units is RATES else 'at least'} 0, not {text!r}")
    return value
