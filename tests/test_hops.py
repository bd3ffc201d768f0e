"""Workers that send to each other without going round a ring."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests import workers
from tests.models import Bag, gradients, grads, mlp, train_step
from tests.rows import ROWS
from thinwire.core.lockstep import Collective
from thinwire.runtime.transport import Transport


def _wire(hop):
    """Where a ring takes a second."""
    seconds = {"all_reduce": 1.0, "all_to_all": hop}
    return mock.patch.object(Transport, "line", lambda self, op="all_reduce": (seconds[op], 0.0))


LONG_WIRE, SHORT_WIRE = _wire(0.1), _wire(0.45)


def _reduced(rank, world, size, dtype):
    with LONG_WIRE:
        transport = Transport(dist.group.WORLD, torch.device("cpu"))
        assert transport.measure(1e9) == (0.2, 0.0)
    given = [torch.randn(size + i, generator=torch.Generator().manual_seed(10 * rank + i)).to(dtype) for i in range(5)]
    pending = [transport.start(Collective("all_reduce", x.clone())) for x in given]  # all under way together
    found = [(x, one.result()) for x, one in zip(given, pending, strict=True)]
    gathered = transport.start(Collective("all_gather", torch.full((size,), rank, dtype=torch.uint8))).result()
    transport.close()
    return found, gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("world", "size"), [(3, 1), (3, 1000), (4, 1000), (5, 7)])
def test_two_hops_give_every_worker_the_sum(world, size, dtype):
    results = workers.run(_reduced, world, size, dtype)
    for i in range(5):
        want = sum(found[i][0].double() for found, _ in results)
        for found, _ in results:
            assert torch.equal(found[i][1], results[0][0][i][1])
            assert found[i][1].dtype == dtype
            assert torch.allclose(found[i][1].double(), want, atol=4 * world * torch.finfo(dtype).eps)
    for _, gathered in results:
        assert gathered.tolist() == [[rank] * size for rank in range(world)]


def _chosen(_rank, world):
    found = []
    for wire in (LONG_WIRE, SHORT_WIRE):
        with wire:
            transport = Transport(dist.group.WORLD, torch.device("cpu"))
            transport.measure(100)
            works = [transport.start(Collective("all_reduce", torch.ones(size))) for size in (4, 4000)]
            assert all(work.result().eq(world).all() for work in works)
            found.append((transport.straight, [type(work.work).__name__ == "Sum" for work in works]))
            transport.close()
    return found, [thread.name for thread in threading.enumerate() if thread.name == "thinwire hops"]


def test_only_where_it_is_faster_and_only_messages_such_as_it_was_chosen_for():
    for found, threads in workers.run(_chosen, 3):
        assert found == [(200, [True, False]), (0, [False, False])]
        assert threads == []  # at interpreter exit one would be caught inside torch's C++ code


def test_two_workers_have_no_ring():
    for found, _ in workers.run(_chosen, 2):
        assert found == [(0, [False, False])] * 2


def _every_row(rank, _world):
    found = {}
    for row in ROWS:
        with LONG_WIRE:
            model = Bag()
            sync = tw.attach(model, row.spec)
        means = []
        for step in range(row.warm_up + 4):
            model.zero_grad()
            model(gradients(rank, step)).backward()
            means.append(grads(model))
        found[row.spec] = means, sync.stats()["bytes_sent"]
    return found


def test_every_method_computes_what_the_simulation_does():
    by_rank = workers.run(_every_row, 3, timeout=180)
    for row in ROWS:
        sim = tw.Simulation(row.spec, 3)
        for step in range(row.warm_up + 4):
            want = sim.reduce([gradients(r, step) for r in range(3)])[0]
            slack = 1e-4 + 8 * row.rounding
            for means in (result[row.spec][0] for result in by_rank):
                assert all(torch.equal(means[step][name], by_rank[0][row.spec][0][step][name]) for name in want)
                for name in want:
                    assert torch.allclose(means[step][name], want[name], rtol=slack, atol=slack), (row.spec, step, name)
        assert by_rank[0][row.spec][1] == sim.bytes_sent, row.spec


def _die(rank, _world, how):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LONG_WIRE:
        tw.attach(model, "acp:rank=2")
    for step in range(2):
        train_step(model, optimizer, rank, step)
    if rank == 2:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12)
        return math.inf
    start = time.monotonic()
    with pytest.raises(tw.ExchangeError):
        train_step(model, optimizer, rank, 2)
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_a_lost_peer_surfaces_within_the_groups_timeout(how):
    if how == "killed":
        with pytest.raises(workers.WorkerError) as raised:
            workers.run(_die, 3, how, group_timeout=6)
        assert raised.value.errors == [None, None, "died"]
        assert max(raised.value.results[:2]) < 12
    else:
        assert max(workers.run(_die, 3, how, group_timeout=6)[:2]) < 12
