"""Measure what a lab's links deliver."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.lab import network
from thinwire.lab.links import Cluster, Link
from thinwire.lab.runner import run

PROBE = Path(__file__).with_name("probe.py")
USUAL = tuple(Link(rate, delay=5e-3) for rate in (10e6, 100e6, 500e6))
"""What is checked if nothing is said."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a link was to deliver from one host to another, and what it did."""

    sender: int
    receiver: int
    rate: float | None
    measured_rate: float
    delay: float
    measured_delay: float

    @property
    def holds(self) -> bool:
        """Within 10 % of the rate and 1 ms of the delay."""
        rate = self.rate is None or abs(self.measured_rate / self.rate - 1) <= 0.1
        return rate and abs(self.measured_delay - self.delay) <= 1e-3


def check(cluster: Cluster, seconds: float = 3.0) -> Iterator[Reading]:
    """From each host to the next, one after the other. Delays are half the round trip."""
    hosts = len(cluster.links)
    if hosts < 2:
        raise ValueError("a check needs at least 2 hosts")
    quiet = replace(cluster, per_host=1, events=())
    for sender in range(hosts):
        receiver = (sender + 1) % hosts
        ends = cluster.links[sender], cluster.links[receiver]
        rtt, rate = _measure(quiet, sender, receiver, seconds)
        nominal = min((link.rate for link in ends if link.rate is not None), default=None)
        yield Reading(sender, receiver, nominal, rate, (ends[0].delay + ends[1].delay) / 2, rtt / 2)


def _measure(cluster: Cluster, sender: int, receiver: int, seconds: float) -> tuple[float, float]:
    said: dict[str, str] = {}

    def note(_host: int, line: str) -> None:
        name, _, value = line.partition(" ")
        said[name] = value

    words = [sender, receiver, network.address(receiver), seconds]
    code = run(cluster, [sys.executable, "-I", "-S", str(PROBE), *map(str, words)], note)
    if code:
        raise ValueError(f"the link from host{sender} to host{receiver} could not be measured: {said}")
    return float(said["rtt"]), float(said["rate"])
