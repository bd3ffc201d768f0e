from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from benchmarks.rare import RareClass
from benchmarks.root import constant, root_sgd, sgd
from tests import workers
from tests.methods.test_dist_ef_sgdm import assert_same_parameters, local_gradients, loss_of, network, parameters_of
from tests.methods.test_slowmo import BATCH_NORM, alone, spied
from thinwire.optim import RootSGD

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    rates: list[float]
    options: dict[str, Any] = field(default_factory=dict)
    world: int = 2


CASES = {
    "dense": Case([0.1] * 8, {"burn_in": 1}),
    "burn-in of three": Case([0.1] * 5 + [0.02] * 4, {"burn_in": 3}, world=3),
    "warm-up from zero": Case([0.0, 0.0, 0.0, 0.05, 0.1, 0.1, 0.0], {"burn_in": 2}),
    "clipped": Case([0.2] * 6, {"burn_in": 2, "clip": 0.3}),
    "short epochs": Case([0.1] * 11, {"burn_in": 2, "epochs": 2, "epoch": 3}),
    "low rank": Case([0.1] * 9, {"burn_in": 2, "exchange": "acp:rank=1"}),
    "one bit": Case([0.05] * 9, {"burn_in": 2, "exchange": "dist-ef-block"}, world=3),
}


def closure_of(opt, model, rank, step):
    def closure():
        opt.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    return closure


def _train(rank, world, cases):
    return {name: _run(rank, case) for name, case in cases.items()}


def _run(rank, case):
    model = DDP(network(), bucket_cap_mb=0.0005)
    opt = RootSGD(model.parameters(), **case.options)
    sync = tw.attach(model, opt)
    rounds, history, losses = spied(opt), [], []
    for step, lr in enumerate(case.rates):
        opt.param_groups[0]["lr"] = lr
        losses.append(opt.step(closure_of(opt, model, rank, step)).item())
        history.append(parameters_of(model.module))
    named = dict(model.module.named_parameters())
    withheld = {
        name: sync.method.withheld(x, sync.ledger.states[name], sync.ledger.context(name, rank, case.world))
        for name, x in named.items()
    }
    return {
        "history": history,
        "losses": losses,
        "rounds": [{name: one[p] for name, p in named.items()} for one in rounds],
        "v": {name: opt.state[p]["v"].clone() for name, p in named.items()},
        "withheld": withheld,
        "stats": sync.stats(),
    }


@pytest.fixture(scope="module")
def runs():
    found = {}
    for world in sorted({case.world for case in CASES.values()}):
        cases = {name: case for name, case in CASES.items() if case.world == world}
        ranks = workers.run(_train, world, cases)
        found |= {name: [result[name] for result in ranks] for name in cases}
    return found


def paper_run(case):
    """The recursion as it is written, its two gradients averaged apart where nothing compresses them."""
    burn_in, clip, spec = (case.options.get(k, d) for k, d in (("burn_in", 10), ("clip", 0), ("exchange", "dense")))
    exchange = tw.Simulation(spec, case.world)
    x = parameters_of(network())
    history = []
    epochs, epoch = case.options.get("epochs", 0), case.options.get("epoch", 1)
    counted = [t for _ in range(epochs) for t in range(1, epoch + 1)] + list(range(1, len(case.rates) + 1))
    for step, (t, lr) in enumerate(zip(counted, case.rates, strict=False)):
        if t == 1:
            v, previous = {name: torch.zeros_like(value) for name, value in x.items()}, x
        new, old = local_gradients(x, case.world, step), local_gradients(previous, case.world, step)
        if spec == "dense":
            g, h = ({name: sum(own[name] for own in each) / case.world for name in x} for each in (new, old))
            v = {name: g[name] + (1 - 1 / t) * (v[name] - h[name]) for name in x}
        else:
            sums = [{n: t * g[n] - (t - 1) * h[n] for n in x} for g, h in zip(new, old, strict=True)]
            v = {name: (1 - 1 / t) * v[name] + mean / t for name, mean in exchange.reduce(sums)[0].items()}
        norm = torch.cat([value.flatten() for value in v.values()]).norm().item()
        scale = min(1.0, clip / norm) if clip else 1.0
        previous = x
        if t >= burn_in:
            x = {name: x[name] - lr * scale * v[name] for name in x}
        history.append(x)
    return history, v


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_papers(runs, name):
    history, v = paper_run(CASES[name])
    for run in runs[name]:
        for seen, wanted in zip(run["history"], history, strict=True):
            assert_same_parameters(seen, wanted, 1e-10)
        assert_same_parameters(run["v"], v, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_one_average_a_step_and_bit_equal_replicas(runs, name):
    first, *others = runs[name]
    for other in others:
        for a, b in zip(first["history"], other["history"], strict=True):
            assert all(torch.equal(a[n], b[n]) for n in a)
    steps = len(CASES[name].rates)
    assert len(first["rounds"]) == first["stats"]["steps"] == steps
    if "exchange" not in CASES[name].options:
        assert first["stats"]["collectives"] == steps
        assert first["stats"]["bytes_sent"] == first["stats"]["bytes_dense"]


@pytest.mark.parametrize("name", ["low rank", "one bit"])
def test_nothing_of_the_gradients_is_lost(runs, name):
    """t v, and what is withheld, is the sum of all that the workers wanted to add to it."""
    ranks, t = runs[name], len(CASES[name].rates)
    for parameter, v in ranks[0]["v"].items():
        total = sum(one[parameter][0] for run in ranks for one in run["rounds"]) / len(ranks)
        owed = sum(run["withheld"][parameter] for run in ranks) / len(ranks)
        torch.testing.assert_close(t * v + owed, total, rtol=1e-11, atol=1e-12)
        assert owed.abs().max() > 1e-6 or v.dim() < 2


def test_the_loss_is_that_at_the_current_point(runs):
    model = network()
    model.load_state_dict(runs["dense"][0]["history"][-2])
    assert runs["dense"][1]["losses"][-1] == pytest.approx(loss_of(model, 1, 7).item(), rel=1e-12)


class Noisy(nn.Module):
    """Dropout and batch norm, and a record of what was dropped."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).double()
        self.second = nn.Linear(8, 2).double()
        self.masks = []

    def forward(self, x):
        hidden = self.first(x)
        self.masks.append(hidden != 0)
        return self.second(hidden)


def test_both_evaluations_see_the_same_randomness_and_statistics_count_once():
    model = Noisy()
    opt = alone(RootSGD(model.parameters(), lr=0.1, burn_in=1), model)
    masks = []
    for step in range(4):
        model.masks = []
        before, drawn = copy.deepcopy(model), torch.get_rng_state()
        opt.step(closure_of(opt, model, 0, step))
        after = torch.get_rng_state()
        torch.set_rng_state(drawn)
        loss_of(before, 0, step)  # one evaluation, at the point where the step began
        assert torch.equal(torch.get_rng_state(), after)
        for (name, seen), (_, wanted) in zip(model.named_buffers(), before.named_buffers(), strict=True):
            assert torch.equal(seen, wanted), name
        assert len(model.masks) == (1 if step == 0 else 2)
        assert torch.equal(model.masks[0], model.masks[-1])
        masks.append(model.masks[0])
    assert not any(torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


def test_an_error_in_the_closure_leaves_the_parameters_in_place():
    x = nn.Parameter(torch.ones(2))
    opt = alone(RootSGD([x], lr=0.5, burn_in=1))

    def closure():
        opt.zero_grad()
        x.square().sum().backward()

    def broken():
        raise ArithmeticError

    for _ in range(3):
        opt.step(closure)
    here = x.detach().clone()
    with pytest.raises(ArithmeticError):
        opt.step(broken)
    assert torch.equal(x, here)


def _resumed(rank, world, case, stop):
    outcomes = []
    for stops in ((), (stop,)):
        torch.manual_seed(0)
        module = nn.Sequential(*copy.deepcopy(BATCH_NORM)).double()
        model, opt, sync = attached(case, module)
        for step, lr in enumerate(case.rates):
            if step in stops:
                file = io.BytesIO()
                torch.save([model.module.state_dict(), opt.state_dict(), sync.state_dict()], file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model, opt, sync = attached(case, copy.deepcopy(module))
                for part, state in zip((model.module, opt, sync), saved, strict=True):
                    part.load_state_dict(state)
            opt.param_groups[0]["lr"] = lr
            opt.step(closure_of(opt, model, rank, step))
        outcomes.append({name: value.clone() for name, value in model.module.state_dict().items()})
    return outcomes


def attached(case, module):
    model = DDP(module)
    opt = RootSGD(model.parameters(), **case.options)
    return model, opt, tw.attach(model, opt)


@pytest.mark.parametrize("name", ["dense", "low rank", "short epochs"])
def test_saved_and_resumed_is_as_if_never_stopped(name):
    ranks = workers.run(_resumed, 2, CASES[name], 5)
    for through, stopped in ranks:
        assert all(torch.equal(through[n], stopped[n]) for n in through)
        assert all(torch.equal(through[n], ranks[0][0][n]) for n in through)


def test_a_bad_number_does_not_stay_in_the_average():
    x = nn.Parameter(torch.ones(2))
    opt = alone(RootSGD([x], lr=0.5, burn_in=1))
    for factor in (1.0, float("nan")):

        def closure(factor=factor):
            opt.zero_grad()
            (factor * x.sum()).backward()

        opt.step(closure)
    assert x.isnan().all()
    assert torch.equal(opt.state[x]["v"], torch.ones(2))


def test_a_closure_is_needed():
    with pytest.raises(ValueError, match="closure"):
        alone(RootSGD([nn.Parameter(torch.ones(1))])).step()


def test_it_must_be_attached():
    with pytest.raises(RuntimeError, match="attach"):
        RootSGD([nn.Parameter(torch.ones(1))]).step(lambda: None)


@pytest.mark.parametrize(
    ("key", "value"), [("lr", -1.0), ("burn_in", 0), ("burn_in", 1.5), ("clip", -1.0), ("epochs", -1)]
)
def test_bad_options_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key} must be"):
        RootSGD([nn.Parameter(torch.ones(1))], **{key: value})


def test_an_epoch_is_no_shorter_than_its_burn_in():
    with pytest.raises(ValueError, match="epoch must be"):
        RootSGD([nn.Parameter(torch.ones(1))], burn_in=20, epochs=1, epoch=19)
    RootSGD([nn.Parameter(torch.ones(1))], burn_in=200)


RUNS = 2000
BURN_IN = 20
H = torch.tensor([[0.8, 0.2, 0.0], [0.2, 0.4, 0.1], [0.0, 0.1, 0.2]], dtype=torch.float64)
SIGMA = torch.tensor([[1.0, -0.3, 0.2], [-0.3, 0.5, 0.0], [0.2, 0.0, 0.4]], dtype=torch.float64)
BOUND = torch.linalg.solve(H, torch.linalg.solve(H, SIGMA).mT)  # H^-1 Sigma H^-1


class Quadratic:
    """E 1/2 (x - x*)' H (x - x*) + z'x with z ~ N(0, Sigma): many independent runs at once, a row for each."""

    def __init__(self, distance):
        self.optimum = torch.full((3,), distance, dtype=torch.float64)
        self.root = torch.linalg.cholesky(SIGMA)
        self.generator = torch.Generator().manual_seed(0)

    def sample(self):
        return torch.randn(RUNS, 3, generator=self.generator, dtype=torch.float64) @ self.root.mT

    def gradient(self, x, z):
        return (x - self.optimum) @ H + z

    def rescaled(self, x, steps):
        """T E (x - x*)(x - x*)'"""
        error = x - self.optimum
        return steps * error.mT @ error / RUNS

    def root_sgd(self, steps, lr):
        x = nn.Parameter(torch.zeros(RUNS, 3, dtype=torch.float64))
        opt = alone(RootSGD([x], lr=lr, burn_in=BURN_IN))
        for _ in range(steps):
            z = self.sample()

            def closure(z=z):
                x.grad = self.gradient(x.detach(), z)

            opt.step(closure)
        return x.detach()

    def sgd(self, steps, lr):
        """The last iterate and the mean of all."""
        x = torch.zeros(RUNS, 3, dtype=torch.float64)
        total = torch.zeros_like(x)
        for _ in range(steps):
            x = x - lr * self.gradient(x, self.sample())
            total += x
        return x, total / steps


@pytest.mark.parametrize("lr", [0.3, 0.8])
def test_the_last_iterates_covariance_is_the_cramer_rao_bound(lr):
    problem, T = Quadratic(5.0), 600
    covariance = problem.rescaled(problem.root_sgd(T, lr), T)
    whitener = torch.linalg.inv(torch.linalg.cholesky(BOUND))
    seen = whitener @ covariance @ whitener.mT
    # an entry of a sample covariance of the identity has a deviation of sqrt(2 / RUNS), or less off the diagonal
    assert (seen - torch.eye(3, dtype=torch.float64)).abs().max() < 5 * (2 / RUNS) ** 0.5


def test_from_afar_it_beats_sgd_and_averaged_sgd_at_equal_gradients_whatever_their_rate():
    problem, T = Quadratic(100.0), 300
    gradients = 2 * T - BURN_IN
    mine = problem.rescaled(problem.root_sgd(T, 0.8), T).trace()
    assert mine < 1.2 * BOUND.trace()
    for lr in (0.05, 0.1, 0.3, 0.6, 1.0, 1.5):
        last, mean = problem.sgd(gradients, lr)
        assert problem.rescaled(last, T).trace() > 1.5 * mine
        assert problem.rescaled(mean, T).trace() > 1.5 * mine


def test_from_nearby_averaged_sgd_at_its_best_rate_gains_from_its_twofold_samples():
    """Where it started no longer matters to either, and ROOT-SGD spends two gradients on each sample."""
    problem, T = Quadratic(1.0), 300
    mine = problem.rescaled(problem.root_sgd(T, 0.8), T).trace()
    _, mean = problem.sgd(2 * T - BURN_IN, 1.0)
    assert 0.4 * mine < problem.rescaled(mean, T).trace() < 0.7 * mine


class Regression:
    """Gaussian features with curvatures h, noise of variance 1, solution 0: the bound is 1 / h."""

    def __init__(self, h, runs):
        self.h = torch.tensor(h, dtype=torch.float64)
        self.shape = runs, len(h)
        self.generator = torch.Generator().manual_seed(1)

    def sample(self):
        noise = torch.randn(self.shape[0], generator=self.generator, dtype=torch.float64)
        return torch.randn(self.shape, generator=self.generator, dtype=torch.float64) * self.h.sqrt(), noise

    def gradient(self, x, sample):
        a, y = sample
        return a * ((a * x).sum(1) - y)[:, None]

    def start(self, distance):
        return torch.full(self.shape, distance, dtype=torch.float64)

    def root_sgd(self, distance, steps, **options):
        x = nn.Parameter(self.start(distance))
        opt = alone(RootSGD([x], burn_in=BURN_IN, **options))
        for _ in range(steps):
            sample = self.sample()

            def closure(sample=sample):
                x.grad = self.gradient(x.detach(), sample)

            opt.step(closure)
        return x.detach()

    def rescaled(self, x, samples):
        """The variance of each coordinate, in units of the bound for so many samples."""
        return samples * x.square().mean(0) * self.h


def test_on_linear_regression_a_constant_rate_costs_what_theory_says():
    """The samples' own curvature A differs from H, so a step adds noise lr^2 E (A - H) Q (A - H) to the optimum's,
    where Q, the covariance of t v, is E (1 - lr A) Q (1 - lr A) + H; for Gaussian a, E A Q A = 2 H Q H + tr(HQ) H."""
    lr, T, runs = 0.1, 1500, 4000
    problem = Regression([1.0, 0.8, 0.5], runs)
    h, Q = problem.h, problem.h
    for _ in range(1000):
        Q = Q - 2 * lr * h * Q + lr**2 * (2 * h * Q * h + (h * Q).sum() * h) + h
    wanted = 1 + lr**2 * (h * Q + (h * Q).sum())
    assert (wanted > 1.1).all()
    seen = problem.rescaled(problem.root_sgd(0.0, T, lr=lr), T)
    assert ((seen / wanted - 1).abs() < 4 * (2 / runs) ** 0.5).all()


def test_from_afar_short_epochs_forget_the_noise_of_the_start():
    """And beat SGD and averaged SGD at equal gradients, whatever their rate, constant or falling as 2 / (mu t)."""
    h, T, runs = [1.0, 0.5, 0.2, 0.05], 1000, 300
    samples = 2 * T - BURN_IN
    single = Regression(h, runs).root_sgd(30.0, T, lr=0.2)
    several = Regression(h, runs).root_sgd(30.0, T, lr=0.2, epochs=2, epoch=100)
    single, several = (Regression(h, runs).rescaled(x, samples).mean() for x in (single, several))
    assert several < 6
    assert single > 20 * several
    for mu, rates in ((0.05, [0.1, 0.2, 0.4]), (0.0, [0.02, 0.05, 0.1, 0.2, 0.4])):
        for lr in rates:
            problem = Regression(h, runs)
            x, total = problem.start(30.0), 0.0
            for t in range(samples):
                x = x - lr / (1 + mu * lr * t / 2) * problem.gradient(x, problem.sample())
                total = total + x
            assert problem.rescaled(x, samples).mean() > 1.5 * several
            assert problem.rescaled(total / samples, samples).mean() > 4 * several


def test_where_a_class_is_rare_it_beats_sgd_and_its_means_at_equal_gradients():
    """At the rates that forget the start they are biased, by the third derivative; whether constant or falling."""
    gradients, runs = 8000, 100
    problem = RareClass(runs, 0)
    mine = problem.excess(root_sgd(problem, problem.start("share"), gradients, constant(2.0)), gradients).mean()
    assert mine < 4  # 2 is the bound for a sample of two gradients
    rates = torch.tensor([0.125, 0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)[:, None, None]
    start = problem.start("share").expand(len(rates), -1, -1)
    for power in (0.0, 1.0):
        results = sgd(problem, start, gradients, lambda t, power=power: rates * min(1.0, 500 / t) ** power)
        for x in results:
            assert (problem.excess(x, gradients).mean(1) > 1.1 * mine).all()
