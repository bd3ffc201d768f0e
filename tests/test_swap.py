"""Point-to-point requests: fused by pair of workers, in any company, and loud when they fail."""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.models import SHAPES, Bag, bag_means, gradients
from thinwire.core.lockstep import Lockstep, cut
from thinwire.core.method import Method, Reduced
from thinwire.core.requests import AllReduce, Swap
from thinwire.methods.gtopk import GTopK


class Parcel(NamedTuple):
    sender: Tensor  # (1,) int16, so that the numbers behind it are not aligned on the wire
    numbers: Tensor


class Routes(Method):
    """Each tensor takes its own way round the workers; some come back, beside an all-reduce."""

    def reduce(self, x, state, ctx):
        number = list(SHAPES).index(ctx.name)
        stride = 1 + number % (ctx.world - 1)
        right, left = (ctx.rank + stride) % ctx.world, (ctx.rank - stride) % ctx.world
        got = yield Swap(Parcel(torch.tensor([ctx.rank], dtype=torch.int16), x.clone()), to=right, source=left)
        assert got.sender.tolist() == [left]
        if number % 2:
            back, mean = yield Swap(got, to=left, source=right), AllReduce(x.clone())
            assert torch.equal(back.numbers, x) and back.sender.tolist() == [ctx.rank]
        else:
            nothing, mean = yield Swap(got, to=None, source=None), AllReduce(x.clone())
            assert nothing is None
        # a chain: the first has nobody to hear from and the last nobody to tell
        before = ctx.rank - 1 if ctx.rank > 0 else None
        after = ctx.rank + 1 if ctx.rank < ctx.world - 1 else None
        told = yield Swap(got, to=after, source=before)
        assert (told is None) == (before is None)
        return Reduced(got.numbers + 2 * mean, sent=x), state

    def __repr__(self):
        return "Routes()"


def expected(rank, world, step):
    inputs = [gradients(r, step) for r in range(world)]
    lefts = {name: (rank - 1 - number % (world - 1)) % world for number, name in enumerate(SHAPES)}
    return {n: inputs[lefts[n]][n] + 2 * torch.stack([x[n] for x in inputs]).mean(0) for n in SHAPES}


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_each_parcel_arrives_in_simulation(world):
    outs = tw.Simulation(Routes(), world).reduce([gradients(r, 0) for r in range(world)])
    for rank, out in enumerate(outs):
        for name, want in expected(rank, world, 0).items():
            torch.testing.assert_close(out[name], want)


def _routes(rank, _world):
    return bag_means(rank, Routes(), 3), bag_means(rank, Routes(), 3, bucket_cap_mb=25)


def test_each_parcel_arrives_over_gloo():
    for rank, ways in enumerate(workers.run(_routes, 4)):
        for means in ways:
            for step, got in enumerate(means):
                for name, want in expected(rank, 4, step).items():
                    torch.testing.assert_close(got[name], want)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_a_round_is_one_message_for_each_pair_of_workers():
    def exchange(number, to, source):
        payload = Pair(torch.full((number,), number, dtype=torch.uint8), torch.tensor(float(number)))
        return (yield Swap(payload, to, source))

    lockstep = Lockstep([exchange(1, 3, None), exchange(2, 0, 3), exchange(3, 3, 0), exchange(4, None, 3)])
    (collective,) = lockstep.advance()
    assert (collective.op, dict(collective.sends), dict(collective.receives)) == ("swap", {0: 6, 3: 12}, {0: 7, 3: 14})
    assert collective.bytes_sent(4) == 18
    messages = cut(collective.buffer, collective.sends)
    assert messages[0][:2].tolist() == [2, 2]
    assert messages[3][0].item() == 1 and messages[3][5:8].tolist() == [3, 3, 3]

    wire = torch.arange(21, dtype=torch.uint8)
    assert lockstep.advance([wire]) == []
    first, second, third, fourth = lockstep.results
    assert first is None
    assert third.a.tolist() == [0, 1, 2]
    assert second.a.tolist() == [7, 8]
    assert fourth.a.tolist() == [13, 14, 15, 16]
    assert fourth.b.shape == ()
    assert fourth.b.reshape(1).view(torch.uint8).tolist() == [17, 18, 19, 20]


def test_a_swap_with_nobody_is_a_round_without_bytes():
    class Alone(Method):
        def reduce(self, x, state, ctx):
            assert (yield Swap((x,), None, None)) is None
            return Reduced(x, x), state

    assert tw.price(Alone(), {"w": (3,)}, 4) == [("swap", 0)]
    assert torch.equal(tw.Simulation(Alone(), 1).reduce([{"w": torch.ones(3)}])[0]["w"], torch.ones(3))


def test_ends_that_do_not_agree_are_caught_in_simulation():
    class Lost(Method):
        def reduce(self, x, state, ctx):
            yield Swap((x,), to=1 - ctx.rank, source=None)
            return Reduced(x, x), state

    with pytest.raises(AssertionError):
        tw.Simulation(Lost(), 2).reduce([{"w": torch.ones(3)}] * 2)


def test_price_is_of_the_rank_that_is_asked_for():
    class Up(Method):
        def reduce(self, x, state, ctx):
            yield Swap((x,), to=0 if ctx.rank else None, source=None if ctx.rank else 1)
            return Reduced(x, x), state

    assert [tw.price(Up(), {"w": (3,)}, 2, rank=r) for r in range(2)] == [[("swap", 0)], [("swap", 12)]]
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank"):
            tw.price(Up(), {"w": (3,)}, 2, rank=rank)


class Stumbling(Method):
    """gTop-k, until rank 2 stumbles between two of its messages, or is lost there."""

    def __init__(self, how):
        self.how = how

    @property
    def whole(self):
        return True

    def reduce(self, x, state, ctx):
        inner, reply, messages = GTopK(ratio=0.1).reduce(x, state, ctx), None, 0
        while True:
            try:
                request = inner.send(reply)
            except StopIteration as stop:
                return stop.value
            if ctx.rank == 2 and ctx.step == 1 and messages == 1:
                if self.how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.how == "hanging":
                    time.sleep(20)
                raise ArithmeticError("stumbled")
            reply = yield request
            messages += 1

    def __repr__(self):
        return "Stumbling()"


def _stumble(rank, _world, how):
    model = DDP(Bag(), bucket_cap_mb=0.001)
    tw.attach(model, Stumbling(how))
    model(gradients(rank, 0)).backward()
    start = time.monotonic()
    try:
        model(gradients(rank, 1)).backward()
    except RuntimeError as error:
        outcome = str(error), time.monotonic() - start
    if rank == 2:
        time.sleep(15)  # the failed rank stays: the others must not need its death
    return outcome


def test_an_error_between_messages_reaches_every_rank_while_the_failed_one_lives():
    for message, seconds in workers.run(_stumble, 4, "raising"):
        assert all(word in message for word in ("Stumbling()", "rank 2", "ArithmeticError", "stumbled"))
        assert seconds < 12


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_a_lost_partner_surfaces_within_the_groups_timeout(how):
    if how == "killed":
        with pytest.raises(workers.WorkerError) as raised:
            workers.run(_stumble, 3, how, group_timeout=10)
        assert raised.value.errors == [None, None, "died"]
        results = raised.value.results
    else:
        results = workers.run(_stumble, 3, how, group_timeout=10)
    for message, seconds in (results[rank] for rank in (0, 1)):
        assert "rank" in message and "whole gradient" in message
        assert seconds < 18
