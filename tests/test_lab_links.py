"""What the lab's links deliver. Bounds that the links set are strict; those that a busy machine can miss are wide."""

from __future__ import annotations

import itertools
import sys

import pytest

from tests.labs import PYTHON, needs_a_lab, output
from thinwire import lab
from thinwire.lab import check, network

pytestmark = needs_a_lab
PROBE = [sys.executable, "-I", "-S", str(check.PROBE), "0", "1", network.address(1), "1"]


def measured(cluster, command=PROBE):
    code, said = output(cluster, command)
    assert code == 0, said
    return {word: float(value) for word, value in (line.split() for lines in said for line in lines)}


@pytest.mark.parametrize("rate", [10e6, 100e6, 500e6])
@pytest.mark.parametrize("delay", ["0ms", "5ms"])
def test_a_link_delivers_its_rate_and_delay(rate, delay):
    for reading in check.check(lab.cluster(2, f"{rate:.0f}bit", delay), seconds=1.0):
        assert reading.rate == rate
        assert 0.7 * rate < reading.measured_rate < 1.1 * rate
        assert reading.delay <= reading.measured_delay < reading.delay + 10e-3


def test_the_thinner_end_decides_both_ways():
    there, back = check.check(lab.cluster(2, "80mbit,8mbit", "1ms,9ms"), seconds=1.0)
    for reading in (there, back):
        assert reading.rate == 8e6 and reading.delay == pytest.approx(5e-3)
        assert 0.7 * 8e6 < reading.measured_rate < 1.15 * 8e6
        assert 5e-3 <= reading.measured_delay < 15e-3


def test_a_rate_changes_while_traffic_flows():
    assert measured(lab.cluster(2, "80mbit", events=["700ms:all:rate=8mbit"]))["rate"] < 1.15 * 8e6


def test_a_delay_changes_while_a_job_runs():
    later = ["sh", "-c", 'sleep 1; exec "$@"', "later", *PROBE]  # its echoes take milliseconds, and so may the change
    assert 40e-3 <= measured(lab.cluster(2, "80mbit", events=["0s:host1:delay=40ms"]), later)["rtt"] < 60e-3


DATAGRAMS = """
import os, socket, sys, time
count, pause = int(sys.argv[1]), float(sys.argv[2])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    if os.environ["RANK"] == "0":
        s.settimeout(0.1)
        for _ in range(200):  # the question for an address may be lost too, and is asked again only after a second
            s.sendto(b"?", ("host1", 1234))
            try:
                s.recv(1)
                break
            except (TimeoutError, ConnectionError):
                pass
        for i in range(count):
            s.sendto(i.to_bytes(4, "big"), ("host1", 1234))
            time.sleep(pause)
    else:
        s.bind(("", 1234))
        s.settimeout(20)
        heard = []
        try:
            while True:
                data, sender = s.recvfrom(4)
                if data == b"?":
                    s.sendto(b"!", sender)
                    continue
                heard.append(int.from_bytes(data, "big"))
                s.settimeout(2)
        except TimeoutError:
            print(*heard)
"""


def heard(cluster, count, pause):
    code, said = output(cluster, [*PYTHON, DATAGRAMS, str(count), str(pause)])
    assert code == 0, said
    return list(map(int, said[1][0].split()))


def test_packets_are_lost_at_the_given_share_and_none_otherwise():
    for loss in (0, 30):
        numbers = heard(lab.cluster(2, None, "1ms", f"{loss}%"), 1500, 2e-3)
        sent = numbers[-1] - numbers[0] + 1
        assert sent > 500 and abs(1 - len(numbers) / sent - loss / 100) <= loss / 500


@pytest.mark.parametrize("delay", [None, "1ms"])
def test_a_link_goes_down_and_comes_back(delay):
    numbers = heard(lab.cluster(2, "10mbit", delay, events=["3s:host1:down", "4s:host1:up"]), 600, 0.01)
    gap = max(after - before for before, after in itertools.pairwise(numbers))
    assert numbers[0] == 0 and gap > 20, "some were lost while it was down"
    assert numbers[-1] == 599, "none after it was up again"
