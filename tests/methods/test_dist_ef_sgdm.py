from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.methods.test_dist_ef import Paper
from thinwire.optim import DistEFBlockSGDM

torch.set_num_threads(1)

WORLD = 3
EVERY_TENSOR = "dist-ef-block:relaxation=1,min_dims=0,min_saving=0"
"""The paper compresses vectors too."""


@dataclass(frozen=True)
class Case:
    rates: list[float]
    options: dict[str, Any] = field(default_factory=dict)
    own_rates: dict[str, list[float]] = field(default_factory=dict)
    """Parameters that have a group, and so a learning rate, of their own."""

    def rate(self, name, step):
        return self.own_rates.get(name, self.rates)[step]


CASES = {
    "step decay and weight decay": Case([0.2] * 5 + [0.02] * 4, {"weight_decay": 0.05}),
    "momentum off": Case([0.2, 0.1, 0.0, 0.3, 0.1, 0.0, 0.2], {"momentum": 0.0, "weight_decay": 0.1}),
    "warm-up from zero": Case([0.0, 0.0, 0.05, 0.1, 0.15, 0.2, 0.2, 0.02], {"momentum": 0.8}),
    "a rate to each group": Case(
        [0.1] * 8, {"weight_decay": 0.02}, own_rates={"2.weight": [0.2, 0.2, 0.2, 0.04, 0.04, 0.04, 0.2, 0.2]}
    ),
    "clipped": Case([0.3] * 6, {"clip": 0.5}),
    "dense": Case([0.2, 0.2, 0.1, 0.3, 0.02, 0.02], {"weight_decay": 0.1, "exchange": "dense"}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 2)
    return nn.Sequential(*layers).double()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, 6, generator=g, dtype=torch.float64)
    return x, torch.randn(5, 2, generator=g, dtype=torch.float64)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return (model(inputs) - targets).square().mean()


def local_gradients(parameters: dict[str, torch.Tensor], world: int, step: int) -> list[dict[str, torch.Tensor]]:
    """What each rank's own data says at the same parameters."""
    model = network()
    model.load_state_dict(parameters)
    names = list(parameters)
    return [
        dict(zip(names, torch.autograd.grad(loss_of(model, rank, step), list(model.parameters())), strict=True))
        for rank in range(world)
    ]


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_parameters(left, right, tolerance):
    for name in right:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


def _train(rank, world, cases):
    return {name: _run(rank, case) for name, case in cases.items()}


def _run(rank, case):
    model = DDP(network(), bucket_cap_mb=0.0005)
    named = dict(model.module.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n not in case.own_rates]},
        *({"params": [named[n]]} for n in case.own_rates),
    ]
    opt = DistEFBlockSGDM(groups, **{"exchange": EVERY_TENSOR} | case.options)
    sync = tw.attach(model, opt, messages=1000)  # one for each bucket
    history = []
    for step in range(len(case.rates)):
        opt.zero_grad()
        for group, rates in zip(opt.param_groups, [case.rates, *case.own_rates.values()], strict=True):
            group["lr"] = rates[step]
        loss_of(model, rank, step).backward()
        opt.step()
        history.append(parameters_of(model.module))
    return history, sync.stats()["collectives"]


@pytest.fixture(scope="module")
def runs():
    """What each case's ranks returned; all cases share the processes."""
    ranks = workers.run(_train, WORLD, CASES)
    return {name: [result[name] for result in ranks] for name in CASES}


def paper_run(case):
    """Algorithm 3 for all workers: the parameters after each step."""
    mu, wd = case.options.get("momentum", 0.9), case.options.get("weight_decay", 0.0)
    limit = case.options.get("clip", torch.inf) / 6**0.5  # for each of six tensors
    x = parameters_of(network())
    m = [{name: torch.zeros_like(value) for name, value in x.items()} for _ in range(WORLD)]
    wm = {name: torch.zeros_like(value) for name, value in x.items()}
    blocks = {name: Paper(value.numel(), WORLD) for name, value in x.items()}
    last = dict.fromkeys(x, 0.0)
    history = []
    for step in range(len(case.rates)):
        gradients = local_gradients(x, WORLD, step)
        for name in x:
            lr = case.rate(name, step)
            p = []
            for i, gradient in enumerate(gradients):
                g = gradient[name] * min(1, limit / gradient[name].norm())
                m[i][name] = mu * m[i][name] + g
                p.append(mu * m[i][name] + g)
            wm[name] = mu * wm[name] + wd * x[name]
            if lr:
                exact = case.options.get("exchange") == "dense"
                ratio = last[name] / lr if last[name] else 1.0
                D = sum(p) / WORLD if exact else blocks[name].step(p, ratio)
                x[name] = x[name] - lr * (D + mu * wm[name] + wd * x[name])
                last[name] = lr
        history.append(dict(x))
    return history


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_papers(runs, name):
    for step, wanted in enumerate(paper_run(CASES[name])):
        for history, _ in runs[name]:
            assert_same_parameters(history[step], wanted, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_replicas_are_bit_equal_and_the_gradient_came_in_several_buckets(runs, name):
    case, (first, collectives) = CASES[name], runs[name][0]
    for history, _ in runs[name][1:]:
        assert all(torch.equal(a[n], b[n]) for a, b in zip(first, history, strict=True) for n in a)
    assert collectives > len(case.rates) * (1 if "exchange" in case.options else 2)


def test_with_an_exact_exchange_it_is_torchs_nesterov_sgd(runs):
    case = CASES["dense"]
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1)
    for step, lr in enumerate(case.rates):
        opt.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(WORLD)) / WORLD).backward()
        opt.param_groups[0]["lr"] = lr
        opt.step()
        assert_same_parameters(runs["dense"][0][0][step], parameters_of(model), 1e-12)


def test_compression_leaves_its_mark(runs):
    exact = paper_run(Case(CASES["step decay and weight decay"].rates, {"weight_decay": 0.05, "exchange": "dense"}))
    seen = runs["step decay and weight decay"][0][0]
    assert all((seen[-1][n] - exact[-1][n]).abs().max() > 1e-3 for n in ("0.weight", "2.weight", "4.weight"))


def test_the_weight_decays_momentum_never_leaves_the_optimizer():
    x = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    opt = DistEFBlockSGDM([x], lr=0.1, momentum=0.5, weight_decay=0.2)
    opt.attached = True
    expected, wm = x.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for _ in range(4):
        x.grad = torch.zeros(2, dtype=torch.float64)
        opt.step()
        wm = 0.5 * wm + 0.2 * expected
        expected = expected - 0.1 * (0.5 * wm + 0.2 * expected)
        torch.testing.assert_close(x.detach(), expected, rtol=1e-15, atol=0)
        assert not x.grad.any()


def test_a_parameter_without_gradient_rests():
    x = torch.nn.Parameter(torch.ones(3))
    opt = DistEFBlockSGDM([x], lr=0.1, weight_decay=0.2)
    opt.attached = True
    opt.step()
    assert torch.equal(x.detach(), torch.ones(3))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("momentum", -0.5),
        ("weight_decay", -1e-3),
        ("clip", -1.0),
    ],
)
def test_bad_options_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key} must be"):
        DistEFBlockSGDM([torch.nn.Parameter(torch.ones(1))], **{key: value})


@pytest.mark.parametrize("exchange", ["no-such-method", "dist-ef-block:momentom=0.9", 3])
def test_a_bad_exchange_is_refused(exchange):
    with pytest.raises(ValueError, match=r"no-such-method|momentom|int"):
        DistEFBlockSGDM([torch.nn.Parameter(torch.ones(1))], exchange=exchange)


def test_it_must_be_attached():
    with pytest.raises(RuntimeError, match="attach"):
        DistEFBlockSGDM([torch.nn.Parameter(torch.ones(1))]).step()


def test_a_second_momentum_is_refused():
    with pytest.raises(ValueError, match="of its own"):
        DistEFBlockSGDM([torch.nn.Parameter(torch.ones(1))], exchange="dist-ef-block:momentum=0.9")
