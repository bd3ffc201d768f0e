"""Start workers on this machine, as torchrun would, and end them together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import click


def launched() -> bool:
    """Whether somebody, torchrun for instance, has started this process as one worker of several."""
    return "RANK" in os.environ


def launch(arguments: Sequence[str], workers: int) -> int:
    """Run ``thinwire ARGUMENTS`` in ``workers`` processes; the exit code is the first failing one's.

    Rank 0 has the terminal. What the others say is shown only if they fail and rank 0 has said nothing.
    """
    command = [sys.executable, "-m", "thinwire", *arguments]
    with _together() as processes:
        for rank, env in enumerate(_environments(workers)):
            quiet = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(command, env=env, **quiet))  # type: ignore[call-overload]
        return _wait(processes)


def run(command: Sequence[str], workers: int, on_line: Callable[[int, str], None]) -> int:
    """Run ``command`` in ``workers`` processes over loopback; ``on_line(rank, line)`` hears what they say."""
    with _together() as processes:
        listeners = []
        for rank, env in enumerate(_environments(workers)):
            env["GLOO_SOCKET_IFNAME"] = "lo"
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            processes.append(process)
            listeners.append(threading.Thread(target=_listen, args=(process.stdout, rank, on_line), daemon=True))
            listeners[-1].start()
        code = _wait(processes)
        for listener in listeners:
            listener.join(timeout=5)
        return code


def _listen(stream: Iterable[bytes], rank: int, on_line: Callable[[int, str], None]) -> None:
    for line in stream:
        on_line(rank, line.decode(errors="replace").rstrip())


def _environments(workers: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
    }
    return [os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


@contextmanager
def _together() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes that all end with this context."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in filter(None, (process.stdout, process.stderr)):
                stream.close()


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
