"""What the tests of the lab share: whether one can run here, and what it may leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thinwire import lab
from thinwire.lab.permission import tools

MISSING = lab.missing()
needs_a_lab = pytest.mark.skipif(MISSING is not None, reason=f"no lab here: {MISSING}")
PYTHON = [sys.executable, "-I", "-S", "-c"]
MARK = "THINWIRE_TEST_MARK"


def output(cluster, command, **env):
    """The exit code, and what each host said."""
    said = [[] for _ in cluster.links]
    code = lab.run(cluster, command, lambda host, line: said[host].append(line), env)
    return code, said


def processes(mark):
    """Those that were started with this mark in their environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found


def networks(pids):
    """The network namespaces they are in."""
    found = set()
    for pid in pids:
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


def everywhere():
    return networks(int(path.name) for path in Path("/proc").glob("[0-9]*"))


def surroundings():
    """Interfaces, named namespaces and mounts of this very place."""
    ip = tools()["ip"]
    links = subprocess.run([ip, "-brief", "link"], capture_output=True, text=True, check=True).stdout
    named = subprocess.run([ip, "netns"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in links.splitlines()], named, Path("/proc/self/mountinfo").read_text()


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
