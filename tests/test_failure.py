"""Failure is loud and whole: every rank hears of it, in time, with method, bucket and rank named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.models import Bag, gradients, mlp, train_step


class Faulty(tw.Method):
    """Dense, until rank 1 stumbles over one tensor at step 2."""

    def reduce(self, x, state, ctx):
        if ctx.rank == 1 and ctx.step == 2 and ctx.name == "c":
            raise ArithmeticError("stumbled")
        return (yield from tw.method("dense").reduce(x.clone(), state, ctx))

    def __repr__(self):
        return "Faulty()"


def _outcome(function):
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def _stumble(rank, _world):
    model = DDP(Bag(), bucket_cap_mb=0.001)
    tw.attach(model, Faulty())
    for step in range(2):
        model(gradients(rank, step)).backward()
    first = _outcome(lambda: model(gradients(rank, 2)).backward())
    if rank == 1:
        time.sleep(15)  # the failed rank stays: the others must not need its death
    return first


def test_an_error_in_the_hook_reaches_every_rank():
    for kind, message, seconds in workers.run(_stumble, 3):
        assert kind == "RuntimeError"
        for word in ("Faulty()", "bucket", "rank 1", "ArithmeticError", "stumbled"):
            assert word in message
        assert seconds < 12


def _die(rank, _world, how):
    model = DDP(mlp(), bucket_cap_mb=0.01)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    tw.attach(model, "dist-ef-block")
    for step in range(2):
        train_step(model, opt, rank, step)
    if rank == 2:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12)
        return None
    return _outcome(lambda: train_step(model, opt, rank, 2))


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_a_lost_peer_surfaces_within_the_groups_timeout(how):
    with pytest.raises(workers.WorkerError) if how == "killed" else _nothing() as raised:
        results = workers.run(_die, 3, how, group_timeout=6)
    if how == "killed":
        # the survivors returned their outcome: only the killed rank has an error
        assert raised.value.errors == [None, None, "died"]
        results = raised.value.results
    for kind, message, seconds in results[:2]:
        assert kind == "RuntimeError"
        assert "rank" in message and "bucket" in message
        assert seconds < 11


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def _attach(rank, _world, specs, models):
    model = DDP(models[rank]())
    first = _outcome(lambda: tw.attach(model, specs[rank]))
    again = _outcome(lambda: tw.attach(model, "dense"))  # a failed attach has changed nothing
    model(torch.randn(2, 32)).sum().backward()
    return first, again


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(32, 4)

    def forward(self, x):
        return self.other(x)


def linear():
    return nn.Sequential(nn.Linear(32, 4))


@pytest.mark.parametrize(
    ("specs", "models", "words"),
    [
        (["acp:rank=4", "acp:rank=2"], [linear, linear], ["rank 0", "rank=4", "rank 1", "rank=2"]),
        (["acp", "nonsense"], [linear, linear], ["nonsense"]),
        (["dense", "dense"], [linear, Renamed], ["0.weight", "other.weight", "rank 1"]),
    ],
    ids=["specs", "bad spec", "names"],
)
def test_ranks_that_disagree_are_told_at_attach(specs, models, words):
    for first, again in workers.run(_attach, 2, specs, models):
        assert first is not None and first[0] == "ValueError"
        assert all(word in first[1] for word in words)
        assert (again is None) == (models[0] is models[1])


def _misuse(_rank, _world):
    model = DDP(mlp())
    tw.attach(model, "dense")
    twice = _outcome(lambda: tw.attach(model, "acp"))
    late_model = DDP(mlp())
    late_model(torch.randn(2, 32)).sum().backward()
    late = _outcome(lambda: tw.attach(late_model, "acp"))
    late_model.zero_grad()
    late_model(torch.randn(2, 32)).sum().backward()
    late_model.zero_grad()
    later = _outcome(lambda: tw.attach(late_model, "acp"))
    sparse = _outcome(lambda: tw.attach(DDP(nn.Embedding(10, 4, sparse=True)), "acp"))
    whole = DDP(nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]))
    imaginary = _outcome(lambda: tw.attach(whole, "acp"))
    no_module = _outcome(lambda: tw.attach(mlp().parameters(), "acp"))
    number = _outcome(lambda: tw.attach(DDP(mlp()), 4))
    plain = _outcome(lambda: tw.attach(DDP(mlp()), torch.optim.SGD(mlp().parameters(), lr=1)))
    trainable = DDP(mlp())
    for p in trainable.parameters():
        p.requires_grad_(False)
    idle = _outcome(lambda: tw.attach(trainable, "acp"))
    return {
        "already": twice,
        "before the first backward": late,
        "attach before": later,
        "sparse": sparse,
        "complex": imaginary,
        "needs a module": no_module,
        "spec": number,
        "SGD": plain,
        "trainable": idle,
    }


def test_misuse_is_explained():
    for outcomes in workers.run(_misuse, 1):
        for word, outcome in outcomes.items():
            assert outcome is not None, word
            assert outcome[0] == "ValueError" and word in outcome[1], (word, outcome)


def _resumed_alone(rank, _world):
    model = DDP(mlp(), bucket_cap_mb=0.01)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = tw.attach(model, "acp:rank=2")
    for step in range(3):
        train_step(model, opt, rank, step)
    fresh = DDP(mlp(), bucket_cap_mb=0.01)
    second = tw.attach(fresh, "acp:rank=2")
    if rank == 1:
        second.load_state_dict(sync.state_dict())
    return _outcome(lambda: train_step(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), rank, 3))


def test_a_rank_that_resumed_alone_is_noticed():
    for _, message, _ in workers.run(_resumed_alone, 2):
        assert "different steps: [0, 3]" in message


def _inf_under_ddp(rank, _world, spec):
    """An Inf on one rank at step 2: all see it, and the steps after it are as if it had not been."""
    model, spared = DDP(Bag(), bucket_cap_mb=0.001), DDP(Bag(), bucket_cap_mb=0.001)
    tw.attach(model, spec)
    tw.attach(spared, spec)
    seen = []
    for step in range(6):
        for which in (model, spared):
            g = gradients(rank, step)
            if step == 2 and which is spared:
                continue
            if step == 2 and rank == 1:
                g["big"][3, 3] = float("inf")
                g["b"][0] = float("nan")
            which.zero_grad()
            which(g).backward()
        bad = sorted(n for n, p in model.module.named_parameters() if not p.grad.isfinite().all())
        same = all(
            torch.equal(p.grad, q.grad)
            for (n, p), q in zip(model.module.named_parameters(), spared.module.parameters(), strict=True)
            if n in ("big", "b")
        )
        seen.append((bad, same))
    return seen


@pytest.mark.parametrize("spec", ["acp:rank=2", "powersgd:rank=2", "dist-ef-block:momentum=0.9", "dense"])
def test_an_inf_does_not_outlive_its_step(spec):
    for seen in workers.run(_inf_under_ddp, 2, spec):
        for step, (bad, same) in enumerate(seen):
            assert bad == (["b", "big"] if step == 2 else [])
            assert same or step == 2


def _own_group(rank, world):
    """The user's own collectives, from the main thread during backward, do not mix with the engine's."""
    model = DDP(mlp(), bucket_cap_mb=0.001)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    tw.attach(model, "powersgd:rank=2")
    totals = []

    def hook(_grad):
        t = torch.tensor([float(rank + 1)])
        dist.all_reduce(t)
        totals.append(t.item())

    next(model.parameters()).register_hook(hook)
    for step in range(3):
        train_step(model, opt, rank, step)
    return totals


def test_other_collectives_during_backward():
    assert workers.run(_own_group, 3) == [[6.0] * 3] * 3
