"""A module that nobody wraps, in real processes over gloo."""

from __future__ import annotations

import copy
import dataclasses
import gc
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.models import Bag, batch, flat, gradients, grads, mlp, train_step
from tests.rows import ROWS
from thinwire.runtime import backward
from thinwire.runtime.engine import KNOWN
from thinwire.runtime.messages import Cuts

TINY = mock.patch.multiple(backward, SIZES=(200, 400), SIZE=800)
"""Bytes, so that even a small model is handed over in several groups."""


def _every_row(rank, _world, dtype):
    found = {}
    for row in ROWS:
        with TINY:
            model = Bag(dtype=dtype)
            sync = tw.attach(model, row.spec)
        means = []
        for step in range(row.warm_up + 4):
            model.zero_grad()
            model(gradients(rank, step, dtype=dtype)).backward()
            means.append(grads(model))
        found[row.spec] = means, sync.stats()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_the_simulation_does(dtype):
    """Bit for bit, with two workers."""
    by_rank = workers.run(_every_row, 2, dtype, timeout=180)
    for row in ROWS:
        sim = tw.Simulation(row.spec, 2)
        for step in range(row.warm_up + 4):
            want = sim.reduce([gradients(r, step, dtype=dtype) for r in range(2)])[0]
            for means, _ in (result[row.spec] for result in by_rank):
                assert all(torch.equal(means[step][name], want[name]) for name in want), (row.spec, step)
        assert by_rank[0][row.spec][1]["bytes_sent"] == sim.bytes_sent, row.spec
        assert by_rank[0][row.spec][1]["steps"] == row.warm_up + 4


def _trained(rank, _world, spec, wrapped):
    torch.manual_seed(0)
    model = DDP(mlp(), bucket_cap_mb=0.01) if wrapped else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with TINY:
        sync = tw.attach(model, spec, optimizer)
    for step in range(6):
        train_step(model, optimizer, rank, step)
    return flat(model), sync.stats()["bytes_dense"]


@pytest.mark.parametrize("spec", ["dense", "acp:rank=2", "dist-ef-block:momentum=0.9", "dist-ef", "topk:ratio=0.1"])
def test_it_trains_as_under_ddp(spec):
    wrapped, bare = (workers.run(_trained, 2, spec, option) for option in (True, False))
    for (a, size), (b, same_size) in zip(wrapped, bare, strict=True):
        assert torch.equal(a, b)
        assert size == same_size


def _started(rank, _world):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    model[1].running_mean.normal_()
    tw.attach(model, "dense")
    model[0](torch.full((2, 4), float(rank))).sum().add(model[1].weight.sum() + model[1].bias.sum()).backward()
    return model.state_dict(), [p.grad is None for p in model.parameters()]


def test_all_ranks_start_from_the_parameters_and_buffers_of_rank_0():
    (first, without), (second, _) = workers.run(_started, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert without == [False, True, False, False]


def _accumulated(rank, _world, spec, apart):
    model = mlp()
    sync = tw.attach(model, spec)
    for step in range(4):
        model.zero_grad()
        losses = [model(batch(rank, 2 * step + i)[0]).square().mean() for i in range(2)]
        if apart:
            with sync.no_sync():
                losses[0].backward()
            losses[1].backward()
        else:
            sum(losses).backward()
    return grads(model), sync.stats()["steps"]


@pytest.mark.parametrize("spec", ["dense", "acp:rank=2", "dist-ef-block"])
def test_gradients_add_up_without_a_word_until_they_are_sent(spec):
    apart, at_once = (workers.run(_accumulated, 2, spec, option)[0] for option in (True, False))
    assert apart[1] == at_once[1] == 4
    for name in apart[0]:
        assert torch.allclose(apart[0][name], at_once[0][name], rtol=1e-4, atol=1e-6)


def _silent(_rank, _world):
    model = mlp()
    sync = tw.attach(model, "dense")
    with pytest.raises(RuntimeError, match="stop"), sync.no_sync():
        raise RuntimeError("stop")
    assert sync.silent is False
    with pytest.raises(ValueError, match="no_sync of its own"), tw.attach(DDP(mlp()), "dense").no_sync():
        pass


def test_no_sync_ends_with_its_block_and_is_ddps_where_there_is_one():
    workers.run(_silent, 2)


def _unused(rank, _world):
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    tw.attach(model, "dense")
    hidden = model["used"](torch.ones(2, 4))
    with pytest.raises(tw.ExchangeError) as caught:
        (hidden if rank == 1 else model["unused"](hidden)).sum().backward()
    return str(caught.value)


def test_a_parameter_without_a_gradient_is_named_on_every_rank():
    for message in workers.run(_unused, 3):
        assert "rank 1" in message
        assert "unused." in message
        assert "find_unused_parameters" in message


class Again(torch.autograd.Function):
    """Has a backward within its backward, as a checkpoint that runs part of the model again."""

    @staticmethod
    def forward(ctx, x, parameter):
        ctx.parameter = parameter
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            ctx.parameter.sum().backward()
        return g, None


def _twice(rank, _world):
    model = mlp()
    tw.attach(model, "dense")
    hidden = model[:4](batch(rank, 0)[0])
    with pytest.raises(tw.ExchangeError) as caught:
        model[4](Again.apply(hidden, model[4].bias) if rank == 0 else hidden).sum().backward()
    return str(caught.value)


def test_a_parameter_with_two_gradients_is_named_on_every_rank():
    for message in workers.run(_twice, 2):
        assert "'4.bias' has two gradients" in message


def _taken(rank, _world):
    model = mlp()
    model[4].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None) if rank == 1 else None)
    tw.attach(model, "dense")
    with pytest.raises(tw.ExchangeError) as caught:
        model(batch(rank, 0)[0]).sum().backward()
    return str(caught.value)


def test_a_gradient_that_another_hook_has_taken_is_missed_on_every_rank():
    for message in workers.run(_taken, 2):
        assert "'4.bias' has lost its gradient" in message


def _local(rank, _world, wrapped):
    model = DDP(mlp()) if wrapped else mlp()
    optimizer = tw.optim.SlowMo(torch.optim.SGD(model.parameters(), lr=0.1), period=2, slow_momentum=0.5)
    tw.attach(model, optimizer)
    for step in range(4):
        train_step(model, optimizer, rank, step)
    return flat(model)


def test_an_optimizer_that_averages_parameters_needs_no_ddp():
    for a, b in zip(workers.run(_local, 2, True), workers.run(_local, 2, False), strict=True):
        assert torch.equal(a, b)


def _resumed(rank, _world, wrapped):
    module, state = mlp(), None
    for under_ddp in wrapped:
        module = copy.deepcopy(module)  # without its hooks
        model = DDP(module) if under_ddp else module
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = tw.attach(model, "dist-ef-block")
        if state is not None:
            sync.load_state_dict(state)
        for _ in range(3):
            train_step(model, optimizer, rank, sync.ledger.step)
        state = sync.state_dict()
    return flat(module)


def test_a_run_under_ddp_goes_on_without_it():
    ends = [workers.run(_resumed, 2, wrapped)[0] for wrapped in ((False, False), (True, False), (False, True))]
    assert all(torch.equal(ends[0], end) for end in ends[1:])


def _refused(rank, _world):
    attached, trained, sharded = mlp(), mlp(), mlp()
    tw.attach(attached, "dense")
    trained(batch(rank, 0)[0]).sum().backward()
    sharded[0].weight._is_flat_param = True
    cases = {
        "attach once": attached,
        "has gradients already": trained,
        "'0.weight' is sharded": sharded,
        "the models differ": mlp() if rank else nn.Linear(3, 3),
        "no trainable parameters": nn.ReLU(),
    }
    for message, model in cases.items():
        with pytest.raises(ValueError, match=message):
            tw.attach(model, "dense")


def test_what_cannot_be_attached_is_refused_on_every_rank():
    workers.run(_refused, 2)


def test_attach_says_what_it_needs():
    with pytest.raises(ValueError, match="needs a module, not str"):
        tw.attach("model", "dense")
    with pytest.raises(ValueError, match="init_process_group"):
        tw.attach(nn.Linear(2, 2), "dense")


@pytest.mark.parametrize(
    ("count", "thick", "thin_sizes"),
    [
        (3, [3], [1, 2]),
        (4, [4], [1, 3]),
        (6, [2, 4], [1, 1, 4]),
        (15, [11, 4], [1, 4, 6, 4]),
        (16, [4, 8, 4], [1, 3, 8, 4]),
        (60, [16, 16, 16, 8, 4], [1, 4, 11, 16, 16, 8, 4]),
    ],
)
def test_the_last_groups_are_small_and_the_first_ones_on_a_thin_wire(count, thick, thin_sizes):
    """Of tensors of a megabyte; all of them, in the reverse of their order."""
    model = nn.ParameterList([nn.Parameter(torch.empty(1 << 18)) for _ in range(count)])
    for thin, sizes in ((False, thick), (True, thin_sizes)):
        ledger = SimpleNamespace(names={p: i for i, p in enumerate(model)})
        adapter = backward.Backward(model, SimpleNamespace(ledger=ledger, cuts=Cuts([], thin=thin)))
        assert [len(group) for group in adapter._groups] == sizes
        handed_over = [adapter._trained[i] for group in adapter._groups for i in group]
        assert [ledger.names[p] for p in handed_over] == list(reversed(range(count)))


def test_groups_are_the_messages_that_the_cuts_ask_for():
    """A parameter goes where its middle is; what is large is divided, and closes its message only in the end."""
    model = [torch.empty(size << 18) for size in (1, 1, 2, 16, 10, 10)]  # megabytes
    assert backward._by_cuts(model, [0.3, 0.85, 0.851, 1.0]) == ([3, 1, 1, 1], {0, 2, 3})  # of 40: at 12 and 34
    assert backward._by_cuts(model[:3], []) == ([3], {0})
    mixed = [torch.empty(4), torch.empty(4, dtype=torch.bfloat16)]
    assert backward._by_cuts(mixed, []) == ([1, 1], {1})


def _cut_anew(rank, _world, spec, wire):
    model, found = mlp(), []
    sync = tw.attach(model, spec)
    sync._engine.plan = dataclasses.replace(sync._engine.plan, latency=1e-6, wire=wire)
    sync._engine.cuts = sync._engine.plan.cuts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapter = next(iter(next(model.parameters())._post_accumulate_grad_hooks.values())).func.__self__
    with mock.patch.object(backward, "EARLY", (64,)):
        for step in range(KNOWN + 4):
            train_step(model, optimizer, rank, step)
            found.append([len(group) for group in adapter._groups])
    return found, flat(model)


def test_groups_follow_the_cuts_when_these_are_known_better_on_all_ranks_alike():
    """First they are about equal; then the first one has nearly all, since backward is long beside such a wire."""
    (groups, model), (other_groups, other_model) = workers.run(_cut_anew, 2, "acp:rank=2", 1e-5)
    assert groups == other_groups
    assert groups[0] == groups[KNOWN] != groups[KNOWN + 1] == groups[-1]
    assert len(groups[0]) > 1
    assert torch.equal(model, other_model)


def test_the_first_groups_are_small_once_it_is_known_that_backward_waits_for_the_wire():
    thin, thick = (workers.run(_cut_anew, 2, "dense", wire)[0] for wire in (1e3, 1e-9))
    assert thin[0][0] == thin[0][KNOWN] != thin[0][KNOWN + 1] == thin[0][-1]
    assert len(thin[0][-1]) == len(thin[0][0]) + 1
    assert all(groups == thin[0][0] for groups in thick[0])
    assert torch.equal(thin[1], thick[1])  # two workers add up alike in any order


def _let_go(rank, _world, spec):
    gc.disable()  # a circle of references would hold them too
    model = mlp()
    tw.attach(model, spec)
    for step in range(3):
        model(batch(rank, step)[0]).square().mean().backward()
        held = {name: StorageWeakRef(p.grad.untyped_storage()) for name, p in model.named_parameters()}
        model.zero_grad()
        deadline = time.monotonic() + 5  # the engine's thread may not have come back yet
        while not all(ref.expired() for ref in held.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
    return [name for name, ref in held.items() if not ref.expired()]


@pytest.mark.parametrize("spec", ["dense", "acp:rank=2", "dist-ef-block", "dist-ef-block:momentum=0.9", "topk"])
def test_nothing_holds_a_gradient_that_training_has_dropped(spec):
    assert workers.run(_let_go, 2, spec) == [[], []]
