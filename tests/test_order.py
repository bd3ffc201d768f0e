"""The engine's rule of order, with a network that answers only when it is told to."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch
from torch.futures import Future

from thinwire.core.requests import AllReduce
from thinwire.runtime.engine import KNOWN, Engine, Job
from thinwire.runtime.messages import Plan
from thinwire.runtime.telemetry import Telemetry
from thinwire.runtime.transport import Pending


class Network:
    """Collectives that end when the test says so."""

    rank, world, share, device = 0, 2, 1.0, torch.device("cpu")
    closed = False

    def __init__(self):
        self.issued = []
        self.open = []

    def close(self):
        self.closed = True

    def start(self, collective):
        numbers = [int(x) for x in collective.buffer]
        self.issued.append(numbers[0] if len(numbers) == 1 else numbers)
        future = Future()
        self.open.append(future)
        return Pending(SimpleNamespace(get_future=lambda: future, wait=lambda: None), collective.buffer)

    def answer(self, which=0):
        self.open.pop(which).set_result(None)


def rounds(number, count):
    for _ in range(count):
        yield AllReduce(torch.full((1,), float(number)))
    return torch.zeros(1), ()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def setup(plan=Plan()):  # noqa: B008
    network, started, finished = Network(), [], []
    engine = Engine(network, Telemetry(), "test", plan)

    def submit(number, last=False, one_round=False, closes=None):
        def start():
            started.append(number)
            return [rounds(number, 1 if one_round else 2)]

        finish = lambda _: finished.append(number)  # noqa: E731
        engine.submit(Job(str(number), start, finish, lambda: None, print, [], last, one_round, closes))

    return network, started, finished, engine, submit


def test_the_next_bucket_is_compressed_under_communication_but_waits_for_its_turn():
    network, started, finished, engine, submit = setup()
    submit(1)
    until(lambda: network.issued == [1])
    submit(2)
    submit(3, last=True)
    until(lambda: started == [1, 2])  # compressed while 1 is on the wire; 3 is not yet looked at
    time.sleep(0.05)
    assert network.issued == [1] and started == [1, 2]
    for expected in ([1, 1], [1, 1, 2], [1, 1, 2, 2], [1, 1, 2, 2, 3], [1, 1, 2, 2, 3, 3]):
        network.answer()
        until(lambda: network.issued == expected)  # noqa: B023
    network.answer()
    until(lambda: finished == [1, 2, 3])
    engine.close()


def test_two_messages_of_one_round_are_under_way_together_and_end_in_order():
    network, _, finished, engine, submit = setup()
    for number in (1, 2, 3):
        submit(number, last=number == 3, one_round=True)
    until(lambda: network.issued == [1, 2])
    network.answer(1)
    time.sleep(0.05)
    assert network.issued == [1, 2] and not finished
    network.answer()
    until(lambda: network.issued == [1, 2, 3] and finished == [1, 2])
    network.answer()
    until(lambda: finished == [1, 2, 3])
    engine.close()


def test_a_second_round_goes_before_the_next_message_whatever_went_before():
    network, _, finished, engine, submit = setup()
    submit(1, one_round=True)
    submit(2)
    submit(3, last=True, one_round=True)
    until(lambda: network.issued == [1, 2])
    network.answer(1)  # the second round is not ahead of the first message's end, which another worker may hear first
    time.sleep(0.05)
    assert network.issued == [1, 2] and not finished
    network.answer()
    until(lambda: network.issued == [1, 2, 2] and finished == [1])
    network.answer()
    until(lambda: network.issued == [1, 2, 2, 3])
    network.answer()
    until(lambda: finished == [1, 2, 3])
    engine.close()


def test_late_buckets_go_in_the_same_order():
    network, _, finished, engine, submit = setup()
    for number in (1, 2, 3):
        submit(number, last=number == 3)
        until(lambda: network.open)
        network.answer()
        until(lambda: network.open)
        network.answer()
        until(lambda: finished[-1:] == [number])  # noqa: B023
    assert network.issued == [1, 1, 2, 2, 3, 3]
    engine.close()


def test_buckets_travel_together_until_their_share_is_full():
    """Each bucket asks for 4 bytes: the second and the fourth pass a third of 24, the fifth is the last."""
    network, started, finished, engine, submit = setup(Plan(price=24, messages=3))
    submit(1)
    until(lambda: started == [1])  # compressed at once, though its message is not full
    submit(2)
    until(lambda: network.issued == [[1, 2]])
    for number in (3, 4, 5):
        submit(number, last=number == 5)
    until(lambda: started == [1, 2, 3, 4])  # the next message, but not the one after it
    time.sleep(0.05)
    assert network.issued == [[1, 2]] and started == [1, 2, 3, 4]
    order = [[1, 2], [1, 2], [3, 4], [3, 4], 5, 5]
    for count in range(2, 7):
        network.answer()
        until(lambda: network.issued == order[:count])  # noqa: B023
    network.answer()
    until(lambda: finished == [1, 2, 3, 4, 5])
    engine.close()


def test_a_step_is_cut_as_the_one_before_it():
    network, _, finished, engine, submit = setup(Plan(price=16, messages=2))
    for step in range(2):
        for number in (1, 2, 3):
            submit(number, last=number == 3)
        for _ in range(4):
            until(lambda: network.open)
            network.answer()
        until(lambda: len(finished) == 3 * (step + 1))  # noqa: B023
    assert network.issued == 2 * [[1, 2], [1, 2], 3, 3]
    assert not network.closed
    engine.close()
    assert network.closed


def test_cuts_follow_backward_once_it_is_known_and_by_what_all_ranks_measured():
    """Equal halves at first; then the first message has what backward hides, however long it took on this rank."""
    network, _, finished, engine, submit = setup(Plan(price=24, one_round=True, messages=None, latency=0.1, wire=0.4))
    network.gathered = []
    network.gather_objects = lambda mine: network.gathered.append(mine) or [3.2, 4.8]
    for step in range(KNOWN + 1):
        assert not network.gathered
        for number in range(1, 7):
            submit(number, last=number == 6, one_round=True)
            if number == 5:
                time.sleep(0.05)
        until(lambda: len(network.open) == 2)
        network.answer()
        network.answer()
        until(lambda: len(finished) == 6 * (step + 1))  # noqa: B023
    assert network.issued == KNOWN * [[1, 2, 3], [4, 5, 6]] + [[1, 2, 3, 4, 5], 6]
    assert len(network.gathered) == 1 and 0.04 < network.gathered[0] < 5
    engine.close()


def test_what_asks_for_more_than_its_price_has_a_message_for_each_bucket_from_there_on():
    network, _, finished, engine, submit = setup(Plan(price=4, messages=1))
    for number in range(1, 6):
        submit(number, last=number == 5, one_round=True)
    for answered in range(4):
        until(lambda: network.open)
        network.answer()
        until(lambda: len(finished) >= answered + 1)  # noqa: B023
    assert network.issued == [[1, 2], 3, 4, 5]
    engine.close()


def test_a_step_is_cut_by_what_the_last_but_one_asked_for():
    """Some methods take turns: here steps of two buckets and of six, each cut in its own middle."""
    network, _, finished, engine, submit = setup(Plan(price=16, messages=2))
    done = 0
    for step in range(6):
        size = 6 if step % 2 else 2
        for number in range(1, size + 1):
            submit(number, last=number == size, one_round=True)
        done += size
        while len(finished) < done:
            if network.open:
                network.answer()
            time.sleep(0.001)
    assert network.issued[-4:] == [1, 2, [1, 2, 3], [4, 5, 6]]
    engine.close()


def test_a_bucket_that_says_whether_its_message_ends_there_is_believed():
    """Whatever the plan's cuts are; but one that asks for more than the price, as a warm-up does, is not held."""
    network, _, finished, engine, submit = setup(Plan(price=24, one_round=True, messages=3))
    for number in range(1, 7):
        submit(number, last=number == 6, one_round=True, closes=number in (1, 5))
    for left in (2, 1):
        until(lambda: len(network.open) == 2)
        network.answer()
        until(lambda: len(network.issued) == 4 - left)  # noqa: B023
    assert network.issued == [1, [2, 3, 4, 5], 6]
    while len(finished) < 6:
        if network.open:
            network.answer()
    engine.plan = Plan(price=2, one_round=True)
    for number in (7, 8):
        submit(number, last=number == 8, one_round=True, closes=False)
    until(lambda: network.issued[3:] == [7, 8])
    engine.close()


def test_backward_is_timed_from_its_first_gradient():
    _, _, _, engine, submit = setup()
    engine.begin()
    time.sleep(0.05)
    submit(1, last=True)
    assert 0.05 <= engine._backward < 5
    time.sleep(0.05)
    submit(2, last=True)  # where nobody says when it began, from its first bucket
    assert engine._backward < 0.05
    engine.close()
