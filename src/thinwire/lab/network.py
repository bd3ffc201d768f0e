"""A cluster as the steps that build it: batches for ``ip`` and ``tc``, settings for the switch.

Every host has ``eth0``, whose other end is a port of one bridge. A token bucket on ``eth0`` shapes what the host sends,
one on the port what it receives. Where anything is delayed or lost, ``switch.py`` takes the bridge's place.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.lab.links import Cluster, Link

INTERFACE = "eth0"
BRIDGE = None
"""Where a step is carried out if not on a host."""

BURST = 1e-3
"""Seconds at the link's rate that may pass at once. More would let small messages through for nothing, less
needs timers that are never late."""
QUEUE = 0.1
"""Seconds at the link's rate that may wait before packets drop."""
PACKET = 1514
UNSHAPED = 10e9
"""Bits per second to reckon with where a link has no rate."""


@dataclass(frozen=True, slots=True)
class Step:
    """Lines for one tool, to be run on a host or at the bridge."""

    host: int | None
    tool: str
    lines: tuple[str, ...]


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def names(cluster: Cluster) -> str:
    """The hosts' names as lines of /etc/hosts, also as torch's sockets see them, mapped into IPv6."""
    hosts = range(len(cluster.links))
    return "".join(f"{prefix}{address(host)} host{host}\n" for host in hosts for prefix in ("", "::ffff:"))


def switched(cluster: Cluster) -> bool:
    delays = any(event.change == "delay" for event in cluster.events)
    return delays or any(link.delay or link.loss for link in cluster.links)


def build(cluster: Cluster) -> list[Step]:
    bridged = not switched(cluster)
    steps = (
        [Step(BRIDGE, "ip", ("link add bridge type bridge mcast_snooping 0", "link set bridge up"))] if bridged else []
    )
    for host, link in enumerate(cluster.links):
        lines = [
            "link set lo up",
            f"link add {INTERFACE} address 02:00:00:00:00:{host + 1:02x} type veth peer name {port(host)} netns 1",
            f"address add {address(host)}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
        ]
        lines += [f"link set {INTERFACE} {limit}" for limit in _offload(cluster, link)]
        joined = (f"link set {port(host)} master bridge",) if bridged else ()
        steps += [Step(host, "ip", tuple(lines)), Step(BRIDGE, "ip", (*joined, f"link set {port(host)} up"))]
    for host, link in enumerate(cluster.links):
        steps += shape(host, link) + ([] if bridged else [delay(host, link)])
    return steps


def _offload(cluster: Cluster, link: Link) -> list[str]:
    """How much TCP may hand over as one packet.

    A loss is to be of one packet, as a wire has them. And what is larger than a bucket is cut up in front of it, at a
    cost; if it already waits behind it when an event shrinks the bucket, it waits for ever.
    """
    if any(link.loss for link in cluster.links):
        return ["gso_max_segs 1"]
    rates = [link.rate, *(event.value for event in cluster.events if event.change == "rate")]
    smallest = min((_burst(rate) for rate in rates if rate is not None), default=None)
    return [] if smallest is None else [f"gso_max_size {min(65536, 0.9 * smallest):.0f}"]


def shape(host: int, link: Link) -> list[Step]:
    """Give the link its rate, for the first time or while traffic flows."""
    if link.rate is None:
        return []
    bucket = f"root handle 1: tbf rate {link.rate:.0f}bit burst {_burst(link.rate):.0f}b limit {_queue(link):.0f}b"
    return [
        Step(host, "tc", (f"qdisc replace dev {INTERFACE} {bucket}",)),
        Step(BRIDGE, "tc", (f"qdisc replace dev {port(host)} {bucket}",)),
    ]


def delay(host: int, link: Link) -> Step:
    """Tell the switch what holds for that host."""
    limit = _queue(link) + link.delay * (link.rate or UNSHAPED) / 8
    return Step(BRIDGE, "switch", (f"{host} {link.delay:g} {link.loss:g} {limit:.0f}",))


def _burst(rate: float) -> float:
    return max(2 * PACKET, BURST * rate / 8)


def _queue(link: Link) -> float:
    """Bytes that may wait before packets drop; never less than the first packets of a few peers."""
    return max(128 * 1024, QUEUE * (link.rate or UNSHAPED) / 8)


def schedule(cluster: Cluster) -> list[tuple[float, list[Step]]]:
    """What to do, and when."""
    links = list(cluster.links)
    plan = []
    for event in sorted(cluster.events, key=lambda event: event.at):
        hosts = range(len(links)) if event.host is None else [event.host]
        steps: list[Step] = []
        for host in hosts:
            links[host] = event.changed(links[host])
            if event.value is None:
                steps.append(Step(BRIDGE, "ip", (f"link set {port(host)} {event.change}",)))
            else:
                steps += shape(host, links[host]) + ([delay(host, links[host])] if switched(cluster) else [])
        plan.append((event.at, steps))
    return plan


def port(host: int) -> str:
    return f"host{host}"
