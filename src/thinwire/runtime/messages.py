"""How a step's exchange is cut into messages: few where latency rules, more where the wire is busy long enough.

Backward hides all messages but the last. Let gradients arrive over B seconds, and the bytes take T on the wire: then a
message may be B / T times as large as the next, and has left the wire when that one comes. Cut so into N, by a ratio of
rho = max(1, B / 1.5T) to be on the safe side, an exchange whose latency is L ends about

    N L + T (rho - 1) / (rho^N - 1)        with rho = 1:   N L + T / N,   the least of which is at N = sqrt(T / L)

after the gradients: every message has its latency, and the last one its share of the bytes. B is not known before some
steps are over. Until then messages are equal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from thinwire.core import price
from thinwire.core.combine import After, Local
from thinwire.core.method import Dense, Method
from thinwire.runtime.transport import Transport

log = logging.getLogger("thinwire")

MARGIN = 1.5
"""How much longer bytes may take in training, which shares processors and memory with the transport."""
CALLS = 1e-3
"""Seconds of a round beyond its latency: calls, and threads that wait for a processor which trains."""
MOST_UNEQUAL = 16.0
"""Of two messages' sizes: beyond it a second one is hardly any bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Where messages end."""

    parts: list[float]
    """Of a step's bytes, after which each message but the last ends."""
    guide: bool = False
    """Whether gradients had best be handed over in just these parts; else buckets are joined as they come."""
    thin: bool = False
    """Whether each bucket is a message, and the wire takes longer than backward."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step's exchange is cut."""

    price: float = 0.0
    """Bytes that all buckets of a step ask for first; with 0, each bucket is a message."""
    one_round: bool = False
    """Whether no message has a second one."""
    messages: int | None = 1
    """How many, of equal size; None for what takes the least time."""
    latency: float = 0.0
    """Seconds, of all of a message's rounds."""
    wire: float = 0.0
    """Seconds that a step's bytes take."""

    def cuts(self, backward: float = 0.0) -> Cuts:
        """If gradients arrive over such a time; 0 where it is not known."""
        if not self.price:
            return Cuts([], thin=0 < backward < self.wire)
        hidden = backward / max(MARGIN * self.wire, 1e-9)
        ratio = 1.0 if self.messages else min(max(1.0, hidden), MOST_UNEQUAL)
        shares = _shares(self.messages or best(self.latency, self.wire, ratio), ratio)
        return Cuts(list(accumulate(shares[:-1])), guide=self.messages is None)


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
    saves = sum(rounds) < sum(price.rounds(Dense(), shapes, world))
    if messages is not None:
        return Plan(rounds[0] if saves else 0.0, one_round, messages)
    if not saves:
        return Plan(0.0, one_round, None, wire=sum(rounds) * transport.line()[1])
    latency, seconds_per_byte = transport.measure(sum(rounds))
    if transport.rank == 0:
        way = "straight" if transport.straight else "in a ring"
        log.info("latency %.2g ms, rate %.3g Mb/s, %s", 1e3 * latency, 8e-6 / max(seconds_per_byte, 1e-12), way)
    return Plan(rounds[0], one_round, None, len(rounds) * (latency + CALLS), sum(rounds) * seconds_per_byte)


def best(latency: float, wire: float, ratio: float = 1.0) -> int:
    """For an exchange whose rounds have this latency together, and whose bytes take ``wire`` seconds."""
    equal = max(1, round(math.sqrt(wire / latency)))
    return min(range(1, equal + 2), key=lambda n: n * latency + wire * _shares(n, ratio)[-1])


def _shares(number: int, ratio: float) -> list[float]:
    """Of each message: each has ``ratio`` times that of the next."""
    sizes = [ratio**-i for i in range(number)]
    return [size / sum(sizes) for size in sizes]


def _past_warm_up(method: Method) -> Method:
    if isinstance(method, Local):
        return method.around(_past_warm_up(method.inner))
    return method.inner if isinstance(method, After) else method
