"""How many messages a step's exchange is cut into: few where latency rules, more where the wire is busy long enough.

Cut into N equal messages, an exchange whose latency is L and whose bytes take T on the wire ends about

    N L + T / N

after the gradients that it waits for: every message has its latency, and the last one, which nothing hides, its share
of the bytes. The least of that is at N = sqrt(T / L).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from thinwire.core import price
from thinwire.core.combine import After, Local
from thinwire.core.method import Dense, Method
from thinwire.runtime.transport import Transport

log = logging.getLogger("thinwire")


class Plan(NamedTuple):
    """How a step's exchange is cut."""

    share: float = 0.0
    """The bytes of a message's first round; with 0, each bucket is a message."""
    one_round: bool = False
    """Whether no message has a second one."""


def plan(
    method: Method, shapes: Mapping[str, Sequence[int]], transport: Transport, messages: int | None = None
) -> Plan:
    """For a given number of ``messages`` or that of the least time.

    All ranks call this and get the same. Buckets are never cut, so there may be fewer messages than that. What saves no
    bytes, a dense warm-up too, has a message for each bucket, since only a bucket alone can be reduced in place.
    """
    world = transport.world
    if world == 1 or method.whole:
        return Plan()
    try:
        rounds = price.rounds(_past_warm_up(method), shapes, world)
    except Exception as error:
        log.info("a message for each bucket: %r cannot be priced (%s)", method, error)
        return Plan()
    one_round = len(rounds) == 1
    if sum(rounds) >= sum(price.rounds(Dense(), shapes, world)):
        return Plan(0.0, one_round)
    if messages is None:
        latency, seconds_per_byte = transport.measure()
        messages = best(len(rounds) * latency, sum(rounds) * seconds_per_byte)
        if transport.rank == 0:
            rate = 8e-6 / max(seconds_per_byte, 1e-12)
            log.info("%d messages a step: latency %.2g ms, rate %.3g Mb/s", messages, 1e3 * latency, rate)
    return Plan(rounds[0] / messages, one_round)


def best(latency: float, wire: float) -> int:
    """For an exchange whose rounds have this latency together, and whose bytes take ``wire`` seconds."""
    return max(1, round(math.sqrt(wire / latency)))


def _past_warm_up(method: Method) -> Method:
    if isinstance(method, Local):
        return method.around(_past_warm_up(method.inner))
    return method.inner if isinstance(method, After) else method
