"""Nothing stays behind a lab, however it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from multiprocessing import forkserver

import pytest

from tests.labs import MARK, everywhere, needs_a_lab, networks, processes, surroundings, wait_until
from tests.workers import _context
from thinwire import lab

pytestmark = needs_a_lab
JOB = ["sh", "-c", "sleep 100 & setsid sleep 100 & wait"]
"""With a grandchild, and one in a session of its own."""


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """A mark for all that the test starts; afterwards nothing that bears it may be found."""
    mark = uuid.uuid4().hex
    forkserver.ensure_running()  # it stays for other tests, so it must not bear the mark
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = surroundings()
    yield mark
    assert wait_until(lambda: not processes(mark)), processes(mark)
    assert surroundings() == before
    assert not list(tmp_path.iterdir())


def _lab(env, started):
    os.environ.update(env)
    started.set()
    lab.run(lab.cluster(3, "10mbit", "1ms"), JOB)


def test_ten_labs_killed_at_any_moment_leave_nothing(traces, tmp_path):
    """Half of them while they may still be building their network, half with all hosts at work."""
    moments = random.Random(0)
    outside = {os.readlink("/proc/self/ns/net")}
    for number in range(10):
        started = _context.Event()
        process = _context.Process(target=_lab, args=({MARK: traces, "TMPDIR": str(tmp_path)}, started))
        process.start()
        assert started.wait(60)
        if number % 2:
            assert wait_until(lambda: len(networks(processes(traces)) - outside) == 4, 30), "three hosts and a switch"
        else:
            time.sleep(moments.uniform(0, 0.3))
        inside = networks(processes(traces)) - outside
        process.kill()
        process.join()
        process.close()
        assert wait_until(lambda: not processes(traces)), processes(traces)
        assert wait_until(lambda inside=inside: not inside & everywhere())


def test_success_and_failure_leave_nothing(traces):
    for code in (0, 3):
        assert lab.run(lab.cluster(2, "10mbit", "1ms"), ["sh", "-c", f"setsid sleep 100 & exit {code}"]) == code
        assert not processes(traces)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_signals_end_all_of_it(traces, number):
    command = [sys.executable, "-m", "thinwire", "lab", "--", "sh", "-c", f"echo ready; {JOB[2]}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    heeded = lambda: signal.signal(number, signal.SIG_DFL)  # noqa: E731  # these tests may run where it is ignored
    with subprocess.Popen(command, text=True, preexec_fn=heeded, **pipes) as run:
        try:
            assert {run.stdout.readline(), run.stdout.readline()} == {"host0 | ready\n", "host1 | ready\n"}
            run.send_signal(number)
            _, said = run.communicate(timeout=20)
        finally:
            run.kill()
    if number == signal.SIGINT:
        assert run.returncode == 130 and said.strip() == "thinwire: interrupted"
    else:
        assert run.returncode == -number


@pytest.mark.usefixtures("traces")
def test_a_lab_within_a_lab():
    inner = [sys.executable, "-m", "thinwire", "lab", "--hosts", "1", "--", "sh", "-c", "exit 5"]
    assert lab.run(lab.cluster(1, None), inner) == 5
