"""What the network interface says was sent."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist


def counter() -> int:
    """Bytes that this host's interface has sent."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"there is no network interface {interface!r}")


def quiet_counter() -> int:
    """The counter at a moment when no worker trains."""
    dist.barrier()
    sent = counter()
    dist.barrier()
    return sent
