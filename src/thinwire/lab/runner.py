"""Run a command on every host of a cluster and pass on what it says."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.lab import network, permission
from thinwire.lab.links import Cluster, Link

INSIDE = Path(__file__).with_name("inside.py")
SWITCH = Path(__file__).with_name("switch.py")
COLOURS = (36, 33, 35, 32, 34, 31)
Listener = Callable[[int, str], None]


def run(
    cluster: Cluster,
    command: Sequence[str],
    on_line: Listener | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``command`` in ``per_host`` processes on each host; the exit code is the first failing one's.

    ``on_line(host, line)`` hears every line of output; by default it is printed. ``env`` is added to this process's
    environment. Raises ``ValueError`` if the command does not exist or a lab is not permitted here.
    """
    whole = os.environ | (env or {})
    if not command:
        raise ValueError("no command is given: write it after --")
    if shutil.which(command[0], path=whole.get("PATH")) is None:
        raise ValueError(f"there is no command {command[0]!r}")
    complaint, code = _run(cluster, command, on_line or show, whole)
    if complaint:
        raise ValueError(permission.explain(complaint))
    return code


def missing() -> str | None:
    """What is not permitted here and how to allow it, in one line; None where a lab can run."""
    if not sys.platform.startswith("linux"):
        return "a lab needs network namespaces, which only Linux has"
    try:
        run(Cluster(links=(Link(rate=1e6, delay=1e-3),)), [sys.executable, "-I", "-S", "-c", ""])
    except ValueError as error:
        return str(error)
    return None


def show(host: int, line: str) -> None:
    """Print a line with its host's name, in the host's colour on a terminal."""
    name = f"host{host} |"
    if sys.stdout.isatty():
        name = f"\x1b[{COLOURS[host % len(COLOURS)]}m{name}\x1b[0m"
    print(name, line, flush=True)


def environment(cluster: Cluster, rank: int, env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, and the interface that gloo is to use."""
    host, local = divmod(rank, cluster.per_host)
    threads = max(1, (os.cpu_count() or 1) // cluster.world)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(host),
        "WORLD_SIZE": str(cluster.world),
        "LOCAL_WORLD_SIZE": str(cluster.per_host),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": network.INTERFACE,
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONUNBUFFERED": env.get("PYTHONUNBUFFERED", "1"),  # lines come when they are said
    }


def cores(host: int, hosts: int) -> list[int]:
    """A host's own, or those that it shares with as many others as any; all of them where that does not come out even.

    Left to the scheduler, a host may be alone on a core while three others share one, and whoever keeps in step with
    all waits for those.
    """
    machine = sorted(os.sched_getaffinity(0))
    if hosts % len(machine) == 0:
        return [machine[host % len(machine)]]
    share = len(machine) // hosts
    return machine[host * share : (host + 1) * share] if share else machine


def _run(cluster: Cluster, command: Sequence[str], on_line: Listener, env: Mapping[str, str]) -> tuple[str, int]:
    """What the lab had to complain about, if it was not to be, and its exit code."""
    with _Output(cluster, on_line) as output:
        plan = {
            "tools": permission.tools(),
            "switch": [sys.executable, "-I", "-S", str(SWITCH), *map(network.port, range(len(cluster.links)))],
            "command": list(command),
            "hosts": len(cluster.links),
            "names": network.names(cluster),
            "build": [asdict(step) for step in network.build(cluster)],
            "events": [(at, [asdict(step) for step in steps]) for at, steps in network.schedule(cluster)],
            "ranks": [
                {
                    "host": rank // cluster.per_host,
                    "pipe": pipe,
                    "cores": cores(rank // cluster.per_host, len(cluster.links)),
                    "env": environment(cluster, rank, env),
                }
                for rank, pipe in enumerate(output.writers)
            ],
        }
        with _lab(output, env) as lab:
            with contextlib.suppress(BrokenPipeError):
                lab.stdin.write(json.dumps(plan) + "\n")
                lab.stdin.flush()
            try:
                output.listen()
                return lab.stderr.read(), lab.wait()
            except KeyboardInterrupt:
                lab.terminate()
                output.listen()
                raise


@contextlib.contextmanager
def _lab(output: _Output, env: Mapping[str, str]) -> Iterator[Any]:
    lab = subprocess.Popen(
        [sys.executable, "-I", "-S", str(INSIDE)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=output.writers,
        env=env,
        text=True,
        start_new_session=True,  # Ctrl-C is heard here alone, and passed on
    )
    try:
        output.handed_over()
        yield lab
    finally:
        lab.kill()
        lab.wait()
        for file in (lab.stdin, lab.stderr):
            with contextlib.suppress(BrokenPipeError):
                file.close()  # type: ignore[union-attr]


class _Output:
    """A pipe from each rank, read by lines."""

    def __init__(self, cluster: Cluster, on_line: Listener) -> None:
        self.on_line = on_line
        self.writers: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._tails: dict[int, bytes] = {}
        for rank in range(cluster.world):
            reader, writer = os.pipe()
            self.writers.append(writer)
            self._tails[reader] = b""
            self._selector.register(reader, selectors.EVENT_READ, rank // cluster.per_host)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.handed_over()
        self._selector.close()
        for reader in self._tails:
            os.close(reader)

    def handed_over(self) -> None:
        """The lab has the writing ends: with them closed here, its end shows."""
        while self.writers:
            os.close(self.writers.pop())

    def listen(self) -> None:
        """Until all pipes are at their end, and so nobody of the lab is left to speak."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                data = os.read(key.fd, 1 << 16)
                *lines, tail = (self._tails[key.fd] + data).split(b"\n")
                self._tails[key.fd] = tail
                if not data:
                    self._selector.unregister(key.fd)
                    lines = [tail] if tail else []
                for line in lines:
                    self.on_line(key.data, line.decode(errors="replace").rstrip("\r"))
