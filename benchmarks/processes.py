"""Run a function in several processes over gloo on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(function: Callable[..., Any], workers: int, *args: Any) -> Any:
    """``function(rank, workers, *args)`` in each process; what rank 0 returned."""
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_main, (workers, folder, queue, function, args), workers)
        return queue.get()


def _main(rank: int, workers: int, folder: str, queue: Any, function: Callable[..., Any], args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=workers)
    result = function(rank, workers, *args)
    if rank == 0:
        queue.put(result)
    dist.barrier()
    dist.destroy_process_group()
