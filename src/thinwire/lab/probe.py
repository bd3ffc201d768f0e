"""What passes between two hosts of a lab: run on each of them with SENDER RECEIVER ADDRESS SECONDS.

A script that needs the standard library alone. The sender prints ``rtt`` and seconds, the receiver ``rate`` and bits of
payload a second, after a first second in which TCP finds its pace and the buckets empty.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time

PORT = 29501
ECHOES = 40
WARM_UP = 1.0
SLICE = 0.25
"""Seconds of a reading. The median of several stands: now and then a busy machine lets everyone wait."""


def send(address: str, seconds: float) -> None:
    with connect(address) as peer:
        trips = []
        for _ in range(ECHOES):
            start = time.perf_counter()
            peer.send(b"?")
            peer.recv(1)
            trips.append(time.perf_counter() - start)
        print("rtt", statistics.quantiles(trips)[0])  # waiting for a core is not the link's delay
        block, end = bytes(1 << 18), time.monotonic() + WARM_UP + seconds + 0.2
        while time.monotonic() < end:
            peer.sendall(block)


def connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            peer = socket.create_connection((address, PORT), timeout=30)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer


def receive(seconds: float) -> None:
    with socket.create_server(("", PORT)) as server:
        peer, _ = server.accept()
    with peer:
        peer.settimeout(30)
        for _ in range(ECHOES):
            peer.send(peer.recv(1))
        into = bytearray(1 << 20)
        peer.recv_into(into)
        pour(peer, into, WARM_UP)
        print("rate", statistics.median(pour(peer, into, SLICE) for _ in range(round(seconds / SLICE))))
        while peer.recv_into(into):
            pass


def pour(peer: socket.socket, into: bytearray, seconds: float) -> float:
    """Receive for some time; bits a second."""
    begun, total = time.monotonic(), 0
    while (now := time.monotonic()) < begun + seconds:
        total += peer.recv_into(into)
    return 8 * total / (now - begun)


if __name__ == "__main__":
    sender, receiver, address, duration = sys.argv[1:]
    if os.environ["RANK"] == sender:
        send(address, float(duration))
    if os.environ["RANK"] == receiver:
        receive(float(duration))
