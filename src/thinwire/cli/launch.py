"""Start workers on this machine, as torchrun would, and end them together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import click


def launched() -> bool:
    """Whether somebody, torchrun for instance, has started this process as one worker of several."""
    return "RANK" in os.environ


def launch(arguments: Sequence[str], workers: int) -> int:
    """Run ``thinwire ARGUMENTS`` in ``workers`` processes; the exit code is the first failing one's.

    Rank 0 has the terminal. What the others say is shown only if they fail and rank 0 has said nothing.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
    }
    processes = []
    for rank in range(workers):
        env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        quiet = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen([sys.executable, "-m", "thinwire", *arguments], env=env, **quiet))  # type: ignore[call-overload]
    try:
        return _wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stderr:
                process.stderr.close()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            break
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)
    # the others hear of it through the process group: give them the time to say what they know
    deadline = time.monotonic() + 5
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    rank = failed[0]
    stderr = processes[rank].stderr
    if processes[0].poll() is None and stderr is not None:
        click.echo(stderr.read().decode(errors="replace"), err=True, nl=False)
    code = processes[rank].returncode
    return code if code > 0 else 1
