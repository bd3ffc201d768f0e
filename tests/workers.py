"""Real processes over gloo for tests: started from a clean server, limited in time, ended by their ids."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "thinwire", "thinwire.kernels.cpu", "tests.workers"])


class WorkerError(AssertionError):
    """A worker raised; ``errors`` has each rank's traceback, or None, and ``results`` what the others returned."""

    def __init__(self, errors: list[str | None], results: list[Any]) -> None:
        self.errors = errors
        self.results = results
        super().__init__("\n".join(f"rank {r}:\n{e}" for r, e in enumerate(errors) if e))


def run(function: Any, world: int, *args: Any, timeout: float = 90, group_timeout: float = 60) -> list[Any]:
    """``function(rank, world, *args)`` in ``world`` processes with a gloo group; what each returned.

    Raises ``WorkerError`` if any raised. A rank that was killed gives the error "died".
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(world):
            mine, theirs = _context.Pipe(duplex=False)
            arguments = (theirs, Path(folder), rank, world, group_timeout, function, args)
            process = _context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            workers.append((process, mine))
        try:
            outcomes = [_outcome(mine, time.monotonic() + timeout) for _, mine in workers]
        finally:
            for process, mine in workers:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
                mine.close()
    if any(error for error, _ in outcomes):
        raise WorkerError([error for error, _ in outcomes], [result for _, result in outcomes])
    return [result for _, result in outcomes]


def _outcome(pipe: Connection, deadline: float) -> tuple[str | None, Any]:
    if not pipe.poll(max(0, deadline - time.monotonic())):
        return "did not finish in time", None
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "died", None


def _main(pipe: Connection, folder: Path, rank: int, world: int, seconds: float, function: Any, args: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    try:
        outcome = (None, function(rank, world, *args))
    except Exception:
        outcome = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(outcome))  # by value: this process does not stay to share memory
    pipe.close()
    if outcome[0] is None:
        dist.destroy_process_group()
    else:
        os._exit(1)  # a failed group may hold threads that wait for a peer
