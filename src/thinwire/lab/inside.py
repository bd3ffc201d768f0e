"""The first process of a lab. It builds the network, starts the ranks and outlives none of them.

Run as a script with the standard library alone: it must have one thread when it enters its namespaces, and a lab
starts in milliseconds. The plan comes as a line of JSON on stdin, which stays open as long as the lab's owner lives. On
stderr it says nothing but why a lab could not be built.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEWNS, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
GRACE = 3.0
"""Seconds from SIGTERM to SIGKILL."""
SIGNALS = {signal.SIGCHLD, signal.SIGTERM}

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """Something that a lab needs was not permitted."""


def call(what: str, function: Any, *args: Any) -> None:
    if function(*args) != 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")


def tie() -> None:
    """Die with the parent. That it lived until the tie was made shows in its end of stdin's pipe."""
    call("PR_SET_PDEATHSIG", libc.prctl, PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    owner = select.poll()
    owner.register(0, 0)
    if owner.poll(0):
        os._exit(1)


def enter(names: str) -> None:
    """Return in the first process of new namespaces, with every right within them."""
    uid, gid = os.geteuid(), os.getegid()
    apart = NEWNS | NEWNET | NEWPID
    if libc.unshare(apart) != 0:  # only root may without a user namespace, and keeps its rights over files so
        call("namespaces", libc.unshare, apart | NEWUSER)
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        except OSError as error:
            raise Refused(f"namespaces: {error.strerror}") from None
    tie()
    first = os.fork()
    if first:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGTERM))
        os._exit(_code(os.waitpid(first, 0)[1]))
    tie()
    call("mounts", libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None)
    if (book := Path("/etc/hosts")).is_file():
        name_hosts(book, names)
    call("/proc", libc.mount, b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)


def name_hosts(book: Path, names: str) -> None:
    """Lay a longer /etc/hosts over the machine's, for the lab alone. It lives in memory, under no path."""
    page = Path("/proc/hosts")
    text = book.read_text()
    call("tmpfs", libc.mount, b"tmpfs", b"/proc", b"tmpfs", 0, None)
    page.write_text(f"{text}\n{names}")
    call("/etc/hosts", libc.mount, bytes(page), bytes(book), None, MS_BIND, None)
    call("tmpfs", libc.umount2, b"/proc", MNT_DETACH)


def namespaces(count: int) -> list[int]:
    """That many network namespaces, each held by a file descriptor alone."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    without_ipv6()
    made = []
    for _ in range(count):
        call("network namespace", libc.unshare, NEWNET)
        made.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        without_ipv6()
    go_to(home)
    return made


def without_ipv6() -> None:
    """Its neighbour discovery would only add to the byte counts."""
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")


def go_to(namespace: int) -> None:
    call("setns", libc.setns, namespace, NEWNET)


class Network:
    """The hosts' namespaces, and the tools that act on them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.tools: dict[str, str] = plan["tools"]
        self.hosts = namespaces(plan["hosts"])
        self.switch: subprocess.Popen[str] | None = None
        self.switch_command: list[str] = plan["switch"]

    def carry_out(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            if step["tool"] == "switch":
                self._tell(step["lines"])
            else:
                self._batch(step["tool"], step["lines"], step["host"])

    def _batch(self, tool: str, lines: list[str], host: int | None) -> None:
        done = subprocess.run(
            [self.tools[tool], "-batch", "-"],
            input="\n".join(lines),
            capture_output=True,
            text=True,
            preexec_fn=None if host is None else lambda: go_to(self.hosts[host]),
        )
        if done.returncode:
            raise Refused(f"{tool}: {' '.join(done.stderr.split())}")

    def _tell(self, lines: list[str]) -> None:
        """To the switch, which starts with the first word to it, when its ports are there, and says that it listens."""
        if self.switch is None:
            pipe = subprocess.PIPE
            self.switch = subprocess.Popen(self.switch_command, stdin=pipe, stdout=pipe, text=True)
            assert self.switch.stdout
            if not self.switch.stdout.readline():
                raise Refused("the switch could not listen")
        assert self.switch.stdin
        self.switch.stdin.writelines(f"{line}\n" for line in lines)
        self.switch.stdin.flush()


def start(rank: dict[str, Any], command: list[str], namespace: int) -> int:
    """Fork and become the command on that host; what it says goes to the rank's pipe."""
    pid = os.fork()
    if pid:
        return pid
    try:
        go_to(namespace)
        os.sched_setaffinity(0, rank["cores"])
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(rank["pipe"], 1)
        os.dup2(rank["pipe"], 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execvpe(command[0], command, os.environ | rank["env"])
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(127)


def supervise(ranks: set[int], events: list[Any], network: Network) -> int:
    """Wait for all ranks, acting on events; the first failure ends the others and is the result."""
    begun = time.monotonic()
    code, deadline = 0, float("inf")
    while ranks and time.monotonic() < deadline:
        due = begun + events[0][0] if events else float("inf")
        wait = min(due, deadline, time.monotonic() + 3600) - time.monotonic()
        heard = signal.sigtimedwait(SIGNALS, max(0.0, wait))
        failed = [128 + signal.SIGTERM] if heard and heard.si_signo == signal.SIGTERM else []
        for pid, ended in reap():
            if pid in ranks:
                ranks.remove(pid)
                failed += [ended] if ended else []
            elif network.switch and pid == network.switch.pid:
                failed.append(ended or 1)
        if failed and not code:
            code, deadline = failed[0], time.monotonic() + GRACE
            for rank in ranks:
                end(rank)
        if time.monotonic() >= due:
            network.carry_out(events.pop(0)[1])
    return code


def end(rank: int) -> None:
    try:
        os.killpg(rank, signal.SIGTERM)
    except ProcessLookupError:  # it has not come to lead its group yet
        os.kill(rank, signal.SIGTERM)


def reap() -> Iterator[tuple[int, int]]:
    """Who has ended, and how. Orphans come here too, as to any first process."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], _code(ended[1])


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> int:
    plan = json.loads(sys.stdin.readline())
    for rank in plan["ranks"]:
        os.set_inheritable(rank["pipe"], False)
    enter(plan["names"])
    network = Network(plan)
    network.carry_out(plan["build"])
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    ranks = {start(rank, plan["command"], network.hosts[rank["host"]]) for rank in plan["ranks"]}
    return supervise(ranks, plan["events"], network)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as refused:
        sys.exit(str(refused))
