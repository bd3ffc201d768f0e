"""What a cluster is: the links of its hosts, and what happens to them. Words in, checked numbers out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        new = None if state else _quantity(name, value, RATES if name == "rate" else TIMES)
        return cls(_quantity("time", at, TIMES), None if host is None else int(host), state or name, new)

    def changed(self, link: Link) -> Link:
        """The link's figures after this."""
        if self.change == "rate":
            return replace(link, rate=self.value)
        return link if self.value is None else replace(link, delay=self.value)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts by their links, processes on each, and what happens while a job runs."""

    links: tuple[Link, ...]
    per_host: int = 1
    events: tuple[Event, ...] = ()

    def __post_init__(self) -> None:
        hosts = len(self.links)
        _check_hosts(hosts)
        if self.per_host < 1:
            raise ValueError(f"per-host must be at least 1, not {self.per_host}")
        for event in self.events:
            if event.host is not None and event.host >= hosts:
                raise ValueError(f"an event is for host{event.host}, but the last host is host{hosts - 1}")
            event.changed(self.links[0])

    @property
    def world(self) -> int:
        return len(self.links) * self.per_host


PRESETS: Mapping[str, Link] = {
    "home": Link(rate=50e6, delay=10e-3, loss=1e-4),
    "wan": Link(rate=200e6, delay=25e-3),
    "ethernet": Link(rate=1e9),
    "cloud": Link(rate=5e9),
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
    _check_hosts(hosts)
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    usual = PRESETS[preset] if preset else Link(None)
    rates: Sequence[float | None] = [usual.rate] * hosts if rate is None else _each(hosts, "rate", rate, RATES)
    delays = [usual.delay] * hosts if delay is None else _each(hosts, "delay", delay, TIMES)
    losses = [usual.loss] * hosts if loss is None else _each(hosts, "loss", loss, SHARES)
    links = tuple(Link(*each) for each in zip(rates, delays, losses, strict=True))
    return Cluster(links, per_host, tuple(sorted(map(Event.parse, events), key=lambda event: event.at)))


def _check_hosts(hosts: int) -> None:
    if not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"there can be 1 to {MAX_HOSTS} hosts, the addresses of 10.77.0.0/24, not {hosts}")


def _each(hosts: int, what: str, text: str, units: Mapping[str, float]) -> Sequence[float]:
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
