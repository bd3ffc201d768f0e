from __future__ import annotations

import copy
import io
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.methods.test_dist_ef_sgdm import assert_same_parameters, loss_of, network, parameters_of
from thinwire.optim import SlowMo
from thinwire.runtime import buckets

torch.set_num_threads(1)

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True})
PLAIN = (torch.optim.SGD, {"lr": 0.1})
ADAM = (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)})


@dataclass(frozen=True)
class Case:
    rates: list[float]
    options: dict[str, Any] = field(default_factory=dict)
    base: tuple[Any, dict[str, Any]] = SGD
    world: int = 2
    kind: Any = SlowMo
    bucket: int = buckets.SIZE

    def optimizer(self, parameters):
        kind, options = self.base
        return self.kind(kind(parameters, **options), **{"period": 3} | self.options)


RISING = [0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 0.2, 0.2, 0.2, 0.1, 0.05, 0.0]
CASES = {
    "dense": Case([0.1] * 12),
    "three workers": Case([0.1] * 12, {"slow_momentum": 0.7, "slow_lr": 0.8}, world=3),
    "warm-up from zero": Case(RISING),
    "warm-up, low rank": Case(RISING, {"exchange": "acp:rank=1"}),
    "local": Case([0.1] * 9, {"slow_momentum": 0.0}),
    "synchronous": Case([0.1] * 6, {"slow_momentum": 0.0, "period": 1}, PLAIN, world=3),
    "adam": Case([0.01] * 9, base=ADAM),
    "adam, kept": Case([0.01] * 9, {"buffers": "keep"}, ADAM),
    "adam, averaged": Case([0.01] * 9, {"buffers": "average"}, ADAM),
    "momentum averaged": Case([0.1] * 9, {"buffers": "average"}),
    "low rank": Case([0.1] * 12, {"exchange": "acp:rank=1"}),
    "low rank of three": Case([0.1] * 12, {"exchange": "acp:rank=1", "slow_momentum": 0.0}, world=3),
    "one bit": Case([0.1] * 12, {"exchange": "dist-ef-block"}),
    "one bit of three": Case([0.1] * 12, {"exchange": "dist-ef-block", "slow_momentum": 0.0}, world=3),
    "one bit of the whole": Case([0.1] * 6, {"exchange": "dist-ef"}),
    "dense, in pieces": Case([0.1] * 6, {"buffers": "average"}, world=3, bucket=400),
    "low rank, in pieces": Case([0.1] * 12, {"exchange": "acp:rank=1"}, bucket=400),
    "the whole, in pieces": Case([0.1] * 6, {"exchange": "dist-ef"}, bucket=400),
}


def spied(opt):
    """What the optimizer asks to have averaged, and gets, at each average."""
    rounds, average = [], opt.workers.average

    def spy(tensors, exact=()):
        sent = {p: x.clone() for p, x in tensors.items()}
        means = average(tensors, exact)
        rounds.append({p: (sent[p], means[p].clone()) for p in sent})
        return means

    opt.workers.average = spy
    return rounds


def run_case(rank, case):
    buckets.SIZE = case.bucket
    model = DDP(network(), bucket_cap_mb=0.0005)
    opt = case.optimizer(model.parameters())
    sync = tw.attach(model, opt, messages=1000)  # one for each bucket
    rounds, history = spied(opt), []
    for step, lr in enumerate(case.rates):
        opt.param_groups[0]["lr"] = lr
        opt.zero_grad()
        loss_of(model, rank, step).backward()
        opt.step()
        history.append(parameters_of(model.module))
    names = {p: name for name, p in model.module.named_parameters()}
    withheld = {
        name: sync.method.withheld(x, sync.ledger.states[name], sync.ledger.context(name, rank, case.world))
        for name, x in model.module.named_parameters()
        if name in sync.ledger.states
    }
    named = [{names[p]: pair for p, pair in one.items()} for one in rounds]
    return {"history": history, "rounds": named, "withheld": withheld, "stats": sync.stats()}


def train_cases(rank, world, cases):
    return {name: run_case(rank, case) for name, case in cases.items()}


def run_cases(cases):
    """What each case's ranks returned; the cases of one number of workers share its processes."""
    found = {}
    for world in sorted({case.world for case in cases.values()}):
        mine = {name: case for name, case in cases.items() if case.world == world}
        ranks = workers.run(train_cases, world, mine)
        found |= {name: [result[name] for result in ranks] for name in mine}
    return found


@pytest.fixture(scope="module")
def runs():
    return run_cases(CASES)


class Replicas:
    """The workers of a case in one process, each with its own base optimizer."""

    def __init__(self, case):
        self.models = [network() for _ in range(case.world)]
        kind, options = case.base
        self.bases = [kind(model.parameters(), **options) for model in self.models]

    def step(self, step, lr):
        for rank, (model, base) in enumerate(zip(self.models, self.bases, strict=True)):
            base.param_groups[0]["lr"] = lr
            base.zero_grad()
            loss_of(model, rank, step).backward()
            base.step()

    def parameters(self):
        return [parameters_of(model) for model in self.models]

    def put(self, x):
        for model in self.models:
            model.load_state_dict(x)

    def treat(self, buffers):
        if buffers == "reset":
            for base in self.bases:
                base.state.clear()
        if buffers == "average":
            for same in zip(*(base.param_groups[0]["params"] for base in self.bases), strict=True):
                states = [base.state[p] for p, base in zip(same, self.bases, strict=True)]
                for key in states[0].keys() - {"step"}:
                    mean = sum(state[key] for state in states) / len(states)
                    for state in states:
                        state[key].copy_(mean)


def paper_run(case):
    """The algorithm for all workers: every worker's parameters after each step."""
    option = {"period": 3, "slow_momentum": 0.5, "slow_lr": 1.0, "buffers": "reset", "exchange": "dense"} | case.options
    workers, history = Replicas(case), []
    exchange = tw.Simulation(option["exchange"], case.world)
    x = workers.parameters()[0]
    u = {name: torch.zeros_like(value) for name, value in x.items()}
    for step, lr in enumerate(case.rates):
        workers.step(step, lr)
        if (step + 1) % option["period"] == 0:
            ended = workers.parameters()
            gamma = sum(case.rates[step + 1 - option["period"] : step + 1]) / option["period"]
            mean = exchange.reduce([{name: x[name] - own[name] for name in x} for own in ended])[0]
            for name in x:
                if gamma:
                    u[name] = option["slow_momentum"] * u[name] + mean[name] / gamma
                    x[name] = x[name] - option["slow_lr"] * gamma * u[name]
            workers.put(x)
            workers.treat(option["buffers"])
        history.append(workers.parameters())
    return history


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_papers(runs, name):
    for step, wanted in enumerate(paper_run(CASES[name])):
        for rank, own in enumerate(wanted):
            assert_same_parameters(runs[name][rank]["history"][step], own, 1e-10)


@pytest.mark.parametrize("name", CASES)
def test_replicas_part_between_averages_and_are_bit_equal_after(runs, name):
    period = CASES[name].options.get("period", 3)
    for step, (first, *others) in enumerate(zip(*(run["history"] for run in runs[name]), strict=True)):
        for other in others:
            equal = [torch.equal(first[n], other[n]) for n in first]
            assert all(equal) or ((step + 1) % period and not any(equal))


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_sent_between_averages(runs, name):
    case, stats = CASES[name], runs[name][0]["stats"]
    averages = len(case.rates) // case.options.get("period", 3)
    assert len(runs[name][0]["rounds"]) == averages
    assert stats["steps"] == len(case.rates)
    numbers = sum(p.numel() for p in network().parameters())
    assert stats["bytes_dense"] == pytest.approx(
        len(case.rates) * 2 * (case.world - 1) / case.world * 8 * numbers, 1e-3
    )
    if case.options.get("exchange", "dense") == "dense" and case.options.get("buffers") != "average":
        assert stats["collectives"] == averages
        assert stats["bytes_sent"] * len(case.rates) == pytest.approx(stats["bytes_dense"] * averages, 1e-3)


def test_large_models_go_in_several_buckets(runs):
    apart, together = (runs[name][0]["stats"]["collectives"] for name in ("low rank, in pieces", "low rank"))
    assert apart > 2 * together


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options.get("exchange") != "dist-ef"])
def test_nothing_is_lost_over_the_averages(runs, name):
    """What was applied, and what is still withheld, is all that the workers' steps came to."""
    ranks = runs[name]
    for parameter, x in ranks[0]["history"][0].items():
        total = sum(one[parameter][0] for run in ranks for one in run["rounds"]) / len(ranks)
        applied = sum(one[parameter][1] for one in ranks[0]["rounds"])
        owed = sum(run["withheld"][parameter] for run in ranks) / len(ranks)
        torch.testing.assert_close(applied + owed, total, rtol=1e-11, atol=1e-12)
        if "exchange" in CASES[name].options and x.dim() == 2:
            assert owed.abs().max() > 1e-6


def test_a_period_of_one_without_momentum_is_synchronous_sgd(runs):
    model, case = network(), CASES["synchronous"]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(len(case.rates)):
        opt.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(case.world)) / case.world).backward()
        opt.step()
        assert_same_parameters(runs["synchronous"][0]["history"][step], parameters_of(model), 1e-14)


def _whole_numbers(rank, world):
    """A linear loss of small whole numbers: every sum and mean is exact, so nothing is rounded."""
    model = DDP(nn.Linear(3, 2, bias=False).double())
    nn.init.ones_(model.module.weight)
    opt = SlowMo(torch.optim.SGD(model.parameters(), lr=0.25), period=1, slow_momentum=0.0)
    tw.attach(model, opt)
    expected = model.module.weight.detach().clone()
    for step in range(6):
        pairs = [
            (torch.tensor([[step, r, 3.0]]).double(), torch.tensor([[r - 2.0, step]]).double()) for r in range(world)
        ]
        opt.zero_grad()
        inputs, weights = pairs[rank]
        (model(inputs) * weights).sum().backward()
        opt.step()
        expected -= 0.25 * sum(weights.mT @ inputs for inputs, weights in pairs) / world
    return model.module.weight.detach(), expected


def test_a_period_of_one_without_momentum_is_synchronous_sgd_to_the_bit_where_sums_are_exact():
    for seen, expected in workers.run(_whole_numbers, 4):
        assert torch.equal(seen, expected)


def test_a_rate_of_zero_moves_nothing_and_leaves_numbers(runs):
    for name in ("warm-up from zero", "warm-up, low rank"):
        history = runs[name][0]["history"]
        assert_same_parameters(history[2], parameters_of(network()), 0)
        assert all(value.isfinite().all() for value in history[-1].values())
        assert not torch.equal(history[-1]["0.weight"], history[2]["0.weight"])


class Alone:
    """One worker, which averages with nobody."""

    def __init__(self, model=None):
        self.model = model

    def average(self, tensors, exact=()):
        return {p: x.clone() for p, x in tensors.items()}

    def skip(self):
        pass

    def buffers(self):
        return list(self.model.buffers()) if self.model else []


def alone(opt, model=None):
    opt.workers = Alone(model)
    return opt


def test_by_hand():
    x = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = alone(SlowMo(torch.optim.SGD([x], lr=0.5), period=2, slow_momentum=0.5, slow_lr=2.0))
    seen = []
    for gradient in (1.0, 3.0, 1.0, 0.0):
        x.grad = torch.tensor([gradient], dtype=torch.float64)
        opt.step()
        seen.append(x.item())
    # x: 1, .5, -1;  u = 2 / .5 = 4;  x = 1 - 2 * .5 * 4 = -3;  -3.5, -3.5;  u = 2 + .5 / .5 = 3;  x = -3 - 3
    assert seen == [0.5, -3.0, -3.5, -6.0]


def test_gamma_is_the_mean_rate_of_the_period_and_of_the_group():
    x, y = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [x]}, {"params": [y], "lr": 4.0}]
    opt = alone(SlowMo(torch.optim.SGD(groups, lr=2.0), period=2, slow_momentum=0.5))
    for _ in range(2):
        x.grad, y.grad = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        opt.step()
        opt.param_groups[0]["lr"] = 0.0  # of x: mean 1, moved 2
    assert opt.state[x]["slow_momentum"].item() == 2.0
    assert opt.state[y]["slow_momentum"].item() == 2.0
    assert (x.item(), y.item()) == (-2.0, -8.0)


def test_a_bad_number_does_not_stay_in_the_slow_momentum():
    x = nn.Parameter(torch.ones(2))
    opt = alone(SlowMo(torch.optim.SGD([x], lr=0.5), period=1))
    for gradient in (1.0, float("nan")):
        x.grad = torch.full((2,), gradient)
        opt.step()
    assert x.isnan().all()
    assert torch.equal(opt.state[x]["slow_momentum"], torch.ones(2))


def test_a_schedule_on_the_wrapper_drives_the_base():
    x = nn.Parameter(torch.ones(2))
    opt = alone(SlowMo(torch.optim.SGD([x], lr=0.5), period=2))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    for rate in (0.5, 0.25, 0.125):
        assert opt.base.param_groups[0]["lr"] == rate
        x.grad = torch.ones(2)
        opt.step()
        schedule.step()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    schedule.step()
    assert opt.param_groups is opt.base.param_groups
    assert opt.base.param_groups[0]["lr"] == 0.5**5


def test_a_closure_is_evaluated_once_by_the_base():
    x = nn.Parameter(torch.ones(2))
    opt = alone(SlowMo(torch.optim.SGD([x], lr=0.5), period=2))
    calls = []

    def closure():
        calls.append(1)
        opt.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0
    assert calls == [1]


def test_the_end_of_training_needs_no_whole_period():
    x = nn.Parameter(torch.zeros(1))
    opt = alone(SlowMo(torch.optim.SGD([x], lr=1.0), period=5, slow_lr=3.0, slow_momentum=0.0))
    opt.meet()
    for _ in range(2):
        x.grad = torch.ones(1)
        opt.step()
    opt.meet()
    assert x.item() == -6.0
    opt.meet()
    assert x.item() == -6.0


BATCH_NORM = (nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def _resumed(rank, world, case, stop):
    """Straight through, and by way of a file at ``stop``, both with running statistics."""
    outcomes = []
    for stops in ((), (stop,)):
        torch.manual_seed(0)
        model = nn.Sequential(*copy.deepcopy(BATCH_NORM)).double()
        model, opt, sync = attached(case, model)
        for step, lr in enumerate(case.rates):
            if step in stops:
                file = io.BytesIO()
                torch.save([model.module.state_dict(), opt.state_dict(), sync.state_dict()], file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model, opt, sync = attached(case, copy.deepcopy(model.module))
                for part, state in zip((model.module, opt, sync), saved, strict=True):
                    part.load_state_dict(state)
            opt.param_groups[0]["lr"] = lr
            opt.zero_grad()
            loss_of(model, rank, step).backward()
            opt.step()
        outcomes.append({name: value.clone() for name, value in model.module.state_dict().items()})
    return outcomes


def attached(case, module):
    model = DDP(module)
    opt = case.optimizer(model.parameters())
    return model, opt, tw.attach(model, opt)


RESUMED = {name: CASES[name] for name in ("warm-up from zero", "low rank", "one bit", "adam, averaged")}


@pytest.mark.parametrize("stop", [5, 6])
@pytest.mark.parametrize("name", RESUMED)
def test_saved_and_resumed_is_as_if_never_stopped(name, stop):
    ranks = workers.run(_resumed, 2, RESUMED[name], stop)
    for through, stopped in ranks:
        assert all(torch.equal(through[n], stopped[n]) for n in through)
    last = [through for through, _ in ranks]
    assert all(torch.equal(last[0][n], last[1][n]) for n in last[0]), "statistics are averaged too"
    assert last[0]["1.running_mean"].any()


def _one_fails(rank, world):
    model, opt, sync = attached(replace(CASES["dense"], options={"period": 1}), network())
    if rank == 1:
        sync.ledger.state = None
    loss_of(model, rank, 0).backward()
    try:
        opt.step()
    except tw.ExchangeError as error:
        return str(error)


def test_an_error_of_one_worker_is_raised_on_all():
    first, second = workers.run(_one_fails, 2)
    assert "rank 1" in first and first == second


def _misattached(rank, world):
    messages = []
    for mistake in ("twice", "hook", "stranger", "differ"):
        model = DDP(network())
        opt = SlowMo(torch.optim.SGD(model.parameters(), lr=0.1), period=2 + rank * (mistake == "differ"))
        try:
            if mistake == "stranger":
                opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            if mistake == "hook":
                model.register_comm_hook(tw.Synchronizer(opt), tw.comm_hook)
                loss_of(model, rank, 0).backward()
            tw.attach(model, opt)
            if mistake == "twice":
                tw.attach(model, "dense")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def test_mistakes_are_named():
    for twice, hook, stranger, differ in workers.run(_misattached, 2):
        assert "attach once" in twice
        assert "thinwire.attach" in hook
        assert "parameters that are not among" in stranger
        assert "period=2" in differ and "period=3" in differ


@pytest.mark.parametrize(
    ("key", "value"),
    [("period", 0), ("period", 2.5), ("slow_momentum", 1.0), ("slow_lr", -1.0), ("buffers", "drop")],
)
def test_bad_options_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key} must be"):
        SlowMo(torch.optim.SGD([nn.Parameter(torch.ones(1))]), **{key: value})


def test_it_must_be_attached():
    with pytest.raises(RuntimeError, match="attach"):
        SlowMo(torch.optim.SGD([nn.Parameter(torch.ones(1))])).step()
