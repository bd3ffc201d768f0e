"""A switch that delays and loses what it hands to a host; it stands in for the bridge where links do.

Not every kernel has netem, so it is done here. Run as a script with the standard library alone. The arguments are the
ports; a line on stdout says that they are bound; a line ``host delay loss limit`` on stdin, in seconds, a share and
bytes, sets what holds for a host. Frames keep their offloads (PACKET_VNET_HDR), so that one read carries up to 64 KiB.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
HEADER = 10
"""Bytes of the virtio header before the frame."""
BUFFER = 1 << 22
FRAME = 1 << 17


class Port:
    """The way to a host: frames wait here until they are due and the link takes them."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        self.socket.bind((name, ETH_P_ALL))
        self.delay = self.loss = 0.0
        self.limit = self.waiting = 0
        self.queue: deque[tuple[float, bytes]] = deque()
        self.full = False

    def fileno(self) -> int:
        return self.socket.fileno()

    def read(self) -> bytes | None:
        try:
            return self.socket.recv(FRAME)
        except OSError:  # nothing there, or the link is down
            return None

    def put(self, now: float, frame: bytes) -> None:
        if self.waiting < self.limit and (not self.loss or random.random() >= self.loss):
            self.queue.append((now + self.delay, frame))
            self.waiting += len(frame)

    def send(self, now: float) -> None:
        self.full = False
        while self.queue and self.queue[0][0] <= now:
            try:
                self.socket.send(self.queue[0][1])
            except BlockingIOError:
                self.full = True
                return
            except OSError:
                pass  # lost: the link is down, or its queue full
            self.waiting -= len(self.queue.popleft()[1])


def forward(source: Port, frame: bytes, ports: list[Port], now: float) -> None:
    """The last byte of a host's address says which port is its own; what is for all goes to all others."""
    if frame[HEADER] & 1:
        for port in ports:
            if port is not source:
                port.put(now, frame)
    elif 0 < frame[HEADER + 5] <= len(ports):
        ports[frame[HEADER + 5] - 1].put(now, frame)


def configure(ports: list[Port]) -> None:
    for line in os.read(0, 1 << 16).decode().splitlines():
        host, delay, loss, limit = line.split()
        port = ports[int(host)]
        port.delay, port.loss, port.limit = float(delay), float(loss), int(limit)


def main() -> None:
    ports = [Port(name) for name in sys.argv[1:]]
    print("listening", flush=True)
    with contextlib.suppress(PermissionError):  # root's is never late, however busy the cores are
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    while True:
        now = time.monotonic()
        waits = [port.queue[0][0] - now for port in ports if port.queue and not port.full]
        full = [port for port in ports if port.full]
        sources: list[Port | int] = [0, *ports]
        for source in select.select(sources, full, [], max(0.0, min(waits, default=3600.0)))[0]:
            if isinstance(source, int):
                configure(ports)
                continue
            while frame := source.read():
                forward(source, frame, ports, time.monotonic())
        now = time.monotonic()
        for port in ports:
            port.send(now)


if __name__ == "__main__":
    main()
