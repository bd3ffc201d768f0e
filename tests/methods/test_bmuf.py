from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.methods.test_dist_ef_sgdm import assert_same_parameters, parameters_of
from tests.methods.test_slowmo import PLAIN, Case, Replicas, alone, run_cases
from thinwire.optim import BMUF, SlowMo

torch.set_num_threads(1)

FALLING = [0.1] * 6 + [0.01] * 6
CASES = {
    "classic": Case(FALLING, {"block_momentum": 0.6, "block_lr": 0.9}, kind=BMUF),
    "nesterov": Case(FALLING, {"block_momentum": 0.6, "block_lr": 0.9, "nesterov": True}, kind=BMUF, world=3),
    "from zero": Case([0.0] * 3 + FALLING, kind=BMUF),
    "kept": Case(FALLING, {"buffers": "keep"}, kind=BMUF),
    "low rank": Case(FALLING, {"nesterov": True, "exchange": "acp:rank=1"}, kind=BMUF),
    "one bit": Case(FALLING, {"exchange": "dist-ef-block"}, kind=BMUF, world=3),
    "slowmo": Case([0.1] * 12, {"slow_momentum": 0.7, "slow_lr": 0.8}),
    "as slowmo": Case([0.1] * 12, {"block_momentum": 0.7, "block_lr": 0.8}, kind=BMUF),
}


@pytest.fixture(scope="module")
def runs():
    return run_cases(CASES)


def paper_run(case):
    """The algorithm for all workers, with W and W_g apart: every worker's parameters after each step."""
    option = {
        "period": 3,
        "block_momentum": 0.5,
        "block_lr": 1.0,
        "nesterov": False,
        "exchange": "dense",
        "buffers": "reset",
    }
    option |= case.options
    eta, zeta = option["block_momentum"], option["block_lr"]
    workers, history = Replicas(case), []
    exchange = tw.Simulation(option["exchange"], case.world)
    start = workers.parameters()[0]  # W_g
    W = dict(start)
    D = {name: torch.zeros_like(value) for name, value in W.items()}
    for step, lr in enumerate(case.rates):
        workers.step(step, lr)
        if (step + 1) % option["period"] == 0:
            ended = workers.parameters()
            G = exchange.reduce([{name: own[name] - start[name] for name in own} for own in ended])[0]
            for name in W:
                D[name] = eta * D[name] + zeta * G[name]
                W[name] = W[name] + D[name]
                start[name] = W[name] + eta * D[name] if option["nesterov"] else W[name]
            workers.put(start)
            workers.treat(option["buffers"])
        history.append(workers.parameters())
    return history


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind is BMUF])
def test_every_step_is_the_papers(runs, name):
    for step, wanted in enumerate(paper_run(CASES[name])):
        for rank, own in enumerate(wanted):
            assert_same_parameters(runs[name][rank]["history"][step], own, 1e-10)


def test_at_a_constant_rate_it_is_slowmo(runs):
    for step, wanted in enumerate(runs["slowmo"][0]["history"]):
        assert_same_parameters(runs["as slowmo"][0]["history"][step], wanted, 1e-12)


def moved(opt, x, rates):
    for step, lr in enumerate(rates):
        opt.param_groups[0]["lr"] = lr
        x.grad = torch.full_like(x, 1.0 + step)
        opt.step()
    return x.detach().clone()


def test_when_the_rate_falls_the_blocks_momentum_does_not():
    ends = []
    for kind in (SlowMo, BMUF):
        x = nn.Parameter(torch.ones(2, dtype=torch.float64))
        ends.append(moved(alone(kind(torch.optim.SGD([x], lr=0.1), 2, 0.5)), x, [0.1, 0.1, 0.01, 0.01]))
    # blocks 0.3 and 0.07; slowmo: 3 then 1.5 + 7, times 0.01
    torch.testing.assert_close(ends[0], torch.full_like(ends[0], 1 - 0.3 - 0.085))
    torch.testing.assert_close(ends[1], torch.full_like(ends[1], 1 - 0.3 - (0.15 + 0.07)))


def test_a_nesterov_block_by_hand():
    x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = alone(BMUF(torch.optim.SGD([x], lr=1.0), period=1, block_momentum=0.5, block_lr=2.0, nesterov=True))
    # D = -2, W = -2, W_g = -3;  then G = -2, D = -1 - 4 = -5, W = -7, W_g = -9.5
    assert moved(opt, x, [1.0]).item() == -3.0
    x.grad = torch.full_like(x, 2.0)
    opt.step()
    assert x.item() == -9.5


@pytest.mark.parametrize(("key", "value"), [("period", 0), ("block_momentum", 1.0), ("block_lr", -1.0)])
def test_bad_options_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key} must be"):
        BMUF(torch.optim.SGD([nn.Parameter(torch.ones(1))]), **{key: value})


def test_the_base_may_be_any_optimizer_and_plain_averaging_is_a_block_momentum_of_zero():
    x = nn.Parameter(torch.ones(2, dtype=torch.float64))
    kind, options = PLAIN
    y = nn.Parameter(torch.ones(2, dtype=torch.float64))
    ends = [
        moved(alone(BMUF(kind([x], **options), 2, 0.0)), x, [0.1] * 4),
        moved(alone(tw.optim.LocalSGD(kind([y], **options), 2)), y, [0.1] * 4),
    ]
    assert torch.equal(*ends)
    assert_same_parameters({"x": ends[0]}, parameters_of(nn.ParameterDict({"x": x})), 0)
