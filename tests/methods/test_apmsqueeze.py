from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.methods import test_acp, test_dist_ef
from tests.methods.test_dist_ef_sgdm import (
    EVERY_TENSOR,
    assert_same_parameters,
    batch,
    local_gradients,
    loss_of,
    network,
    parameters_of,
)
from thinwire.core.method import Context
from thinwire.optim import APMSqueeze

torch.set_num_threads(1)

POISONED = "2.weight"
UNTOUCHED = "0.weight"
NEVER = 10**9


@dataclass(frozen=True)
class Case:
    world: int
    rates: list[float]
    options: dict[str, Any] = field(default_factory=dict)
    poison: tuple[int, ...] = ()
    """Steps at which rank 1 has a NaN in its gradient of one parameter, whose value is put back afterwards."""
    mute: bool = False
    """Whether the first input is always zero, and with it the gradient of the first column of the first weight."""


SHARED = {"betas": (0.8, 0.9), "eps": 1e-6}
PUBLISHED = SHARED | {"bias_correction": False}
FALLING = [0.02] * 8 + [0.002] * 4
CASES = {
    "dense": Case(2, FALLING, PUBLISHED | {"warmup_steps": 4, "exchange": "dense", "weight_decay": 0.1}),
    "dense, bias corrected": Case(2, FALLING, SHARED | {"warmup_steps": 4, "exchange": "dense"}),
    "warm-up": Case(3, FALLING, PUBLISHED | {"warmup_steps": NEVER, "weight_decay": 0.05}),
    "warm-up, bias corrected": Case(3, FALLING, SHARED | {"warmup_steps": NEVER}),
    "one bit": Case(2, FALLING, PUBLISHED | {"warmup_steps": 4, "weight_decay": 0.1}),
    "one bit of three": Case(3, FALLING, SHARED | {"warmup_steps": 3}),
    "one bit from the first": Case(3, FALLING, SHARED | {"warmup_steps": 1}),
    "one bit when settled": Case(2, [0.01, 0.02] + [0.03] * 10, {"betas": (0.5, 0.75), "warmup_steps": "auto"}),
    "low rank": Case(2, FALLING, SHARED | {"warmup_steps": 4, "exchange": "acp:rank=1"}),
    "poisoned": Case(2, FALLING, SHARED | {"warmup_steps": 5}, poison=(2, 7)),
    "poisoned, three": Case(3, FALLING, SHARED | {"warmup_steps": 5}, poison=(2, 7)),
    "mute": Case(2, [0.01] * 12, {"warmup_steps": 4}, mute=True),
    "mute, not floored": Case(2, [0.01] * 12, {"warmup_steps": 4, "v_floor": 0.0}, mute=True),
}
PLAIN = [name for name, case in CASES.items() if not case.mute]


def _train(rank, world, cases):
    return {name: _run(rank, case) for name, case in cases.items()}


def _run(rank, case):
    model = DDP(network(), bucket_cap_mb=0.0005)
    opt = APMSqueeze(model.parameters(), **{"exchange": EVERY_TENSOR} | case.options)
    sync = tw.attach(model, opt)
    named = dict(model.module.named_parameters())
    armed = []
    named[POISONED].register_hook(lambda g: _with_nan(g) if armed and rank == 1 else g)
    record = {"history": [], "kept": [], "frozen_at": None}
    for step, lr in enumerate(case.rates):
        opt.zero_grad()
        opt.param_groups[0]["lr"] = lr
        armed[:] = [step] if step in case.poison else []
        before = parameters_of(model.module)[POISONED], _kept(opt, sync, named)
        inputs, targets = batch(rank, step)
        if case.mute:
            inputs[:, 0] = 0
        (model(inputs) - targets).square().mean().backward()
        opt.step()
        if armed:
            record["kept"].append((named[POISONED].isnan().any().item(), before[1], _kept(opt, sync, named)))
            named[POISONED].data.copy_(before[0])
        record["history"].append(parameters_of(model.module))
        if opt.frozen and record["frozen_at"] is None:
            record["frozen_at"] = step + 1
    record["m"] = {name: opt.state[p]["exp_avg"].clone() for name, p in named.items()}
    record["v"] = {name: variance(opt, p, case.options.get("bias_correction", True)) for name, p in named.items()}
    record["collectives"] = sync.stats()["collectives"]
    return record


def variance(opt, p, corrected=True):
    """v, which is kept as sqrt v + eps once it is frozen; eps is then in units of an uncorrected v."""
    group, state = opt.param_groups[0], opt.state[p]
    if not opt.frozen:
        return state["exp_avg_sq"].clone()
    correction = 1 - group["betas"][1] ** group["frozen_at"] if corrected else 1
    return (state["spread"] - group["eps"] * correction**0.5).square()


def _with_nan(g):
    g = g.clone()
    g.view(-1)[0] = float("nan")
    return g


def _kept(opt, sync, named):
    """All that outlives a step, of the parameter that is poisoned."""
    states = sync.state_dict()["states"].get(POISONED, {})
    tensors = {k: v.clone() for k, v in states.items() if isinstance(v, torch.Tensor)}
    return tensors | {k: v.clone() for k, v in opt.state[named[POISONED]].items()}


@pytest.fixture(scope="module")
def runs():
    """What each case's ranks returned; the cases of one number of workers share its processes."""
    found = {}
    for world in sorted({case.world for case in CASES.values()}):
        cases = {name: case for name, case in CASES.items() if case.world == world}
        ranks = workers.run(_train, world, cases)
        found |= {name: [result[name] for result in ranks] for name in cases}
    return found


def exchange_of(case, name, like):
    """The paper's compressed mean of one parameter: a function of the workers' tensors."""
    spec = case.options.get("exchange", EVERY_TENSOR)
    if spec == "dense" or (spec.startswith("acp") and like.dim() < 2):
        return lambda tensors: sum(tensors) / len(tensors)
    if spec.startswith("acp"):
        factors = tw.method(spec).init(like, Context(name=name, world=case.world)).inner
        return test_acp.Paper(factors.P, factors.Q, case.world).step
    return test_dist_ef.Paper(like.numel(), case.world).step


def settled(v_sums, rates, b2):
    """The published rule, after the steps so far: v no longer falls over 1/(1-b2) steps, and lr no longer rises."""
    t, D = len(v_sums) - 1, round(1 / (1 - b2))
    return t >= D and rates[t] <= rates[t - 1] and v_sums[t] / v_sums[t - D] >= 0.96


def paper_run(case):
    """The algorithm for all workers: the parameters after each step, then m, v and when v was frozen."""
    option = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "v_floor": 1e-2, "bias_correction": True}
    option |= case.options
    (b1, b2), eps, wd = option["betas"], option["eps"], option["weight_decay"]
    x = parameters_of(network())
    m, v = ({name: torch.zeros_like(value) for name, value in x.items()} for _ in range(2))
    exchange = {name: exchange_of(case, name, value) for name, value in x.items()}
    frozen_at, v_sums, history = None, [], []
    for step, lr in enumerate(case.rates):
        gradients = local_gradients(x, case.world, step)
        for name in x:
            if step in case.poison and name == POISONED:
                continue
            if frozen_at is None:
                g = sum(g[name] for g in gradients) / case.world
                m[name] = b1 * m[name] + (1 - b1) * g
                v[name] = b2 * v[name] + (1 - b2) * g**2
            else:
                m[name] = exchange[name]([b1 * m[name] + (1 - b1) * g[name] for g in gradients])
            c1 = 1 - b1 ** (step + 1) if option["bias_correction"] else 1
            c2 = 1 - b2 ** (frozen_at or step + 1) if option["bias_correction"] else 1
            x[name] = x[name] - lr * (m[name] / c1 / ((v[name] / c2).sqrt() + eps) + wd * x[name])
        history.append(dict(x))
        v_sums.append(sum(value.sum().item() for value in v.values()))
        auto = option["warmup_steps"] == "auto"
        if frozen_at is None and (settled(v_sums, case.rates, b2) if auto else step + 1 == option["warmup_steps"]):
            frozen_at = step + 1
            if option.get("exchange") != "dense":
                v = {name: value.clamp(min=option["v_floor"] * value.mean().item()) for name, value in v.items()}
    return history, m, v, frozen_at


@pytest.mark.parametrize("name", PLAIN)
def test_every_step_is_the_papers(runs, name):
    case = CASES[name]
    exact = case.options.get("exchange") == "dense" or case.options["warmup_steps"] == NEVER
    tolerance = 1e-12 if exact else 1e-10
    history, m, v, frozen_at = paper_run(case)
    for run in runs[name]:
        assert run["frozen_at"] == frozen_at
        for seen, wanted in zip(run["history"], history, strict=True):
            assert_same_parameters(seen, wanted, tolerance)
        assert_same_parameters(run["m"], m, tolerance)
        assert_same_parameters(run["v"], v, tolerance)


@pytest.mark.parametrize("name", CASES)
def test_replicas_are_bit_equal_and_the_gradient_came_in_several_buckets(runs, name):
    first = runs[name][0]
    assert first["collectives"] > len(CASES[name].rates)
    for run in runs[name][1:]:
        assert all(torch.equal(a[n], b[n]) for a, b in zip(first["history"], run["history"], strict=True) for n in a)
        assert all(torch.equal(first[key][n], run[key][n]) for key in ("m", "v") for n in first[key])


@pytest.mark.parametrize("name", ["dense", "one bit", "low rank"])
def test_the_freeze_and_the_compression_leave_their_marks(runs, name):
    case = CASES[name]
    never_frozen = Case(case.world, case.rates, case.options | {"warmup_steps": NEVER})
    exact = Case(case.world, case.rates, case.options | {"exchange": "dense"})
    last = runs[name][0]["history"][-1]
    assert (last[POISONED] - paper_run(never_frozen)[0][-1][POISONED]).abs().max() > 1e-4
    apart = (last[POISONED] - paper_run(exact)[0][-1][POISONED]).abs().max()
    assert (apart < 1e-12) if name == "dense" else (apart > 1e-4)


def test_a_bias_corrected_warm_up_is_torchs_adam(runs):
    case = CASES["warm-up, bias corrected"]
    model = network()
    opt = torch.optim.Adam(model.parameters(), **SHARED)
    for step, lr in enumerate(case.rates):
        opt.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(case.world)) / case.world).backward()
        opt.param_groups[0]["lr"] = lr
        opt.step()
        assert_same_parameters(runs["warm-up, bias corrected"][0]["history"][step], parameters_of(model), 1e-12)


@pytest.mark.parametrize("name", ["poisoned", "poisoned, three"])
def test_a_nan_on_one_rank_spoils_its_parameter_everywhere_but_no_moment_and_no_error(runs, name):
    case = CASES[name]
    for run in runs[name]:
        assert len(run["kept"]) == len(case.poison)
        for spoiled, before, after in run["kept"]:
            assert spoiled
            assert len({"exp_avg", "exp_avg_sq", "spread"} & before.keys()) == 2
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before)
        assert any(value.any() for key, value in after.items() if "error" in key)
        assert all(x.isfinite().all() for parameters in run["history"] for x in parameters.values())


def test_a_coordinate_that_was_never_touched_does_not_explode_after_the_freeze(runs):
    def moved(name):
        history = runs[name][0]["history"]
        return (history[-1][UNTOUCHED] - history[3][UNTOUCHED])[:, 0].abs().max().item()

    start, frozen = network().state_dict()[UNTOUCHED], runs["mute"][0]["history"][3][UNTOUCHED]
    assert torch.equal(start[:, 0], frozen[:, 0])
    assert not torch.equal(start[:, 1], frozen[:, 1])
    assert 0 < moved("mute") < 5
    assert moved("mute, not floored") > 100 * moved("mute")


def test_the_floor_is_a_fraction_of_each_tensors_mean_or_of_all_where_a_tensor_was_never_touched():
    parameters = [torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2)]
    opt = APMSqueeze(parameters, betas=(0.0, 0.0), warmup_steps=1, v_floor=0.25)
    parameters[0].grad = torch.tensor([4.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    parameters[1].grad = torch.zeros(4, dtype=torch.float64)
    opt.step()
    touched, untouched = (variance(opt, p) for p in parameters)
    assert touched.tolist() == pytest.approx([16.0, 4.0, 0.25 * 21 / 4, 0.25 * 21 / 4])
    assert untouched.tolist() == pytest.approx([0.25 * 21 / 8] * 4)


def gradient_sizes(kind, steps):
    return {
        "constant": [1.0] * steps,
        "falling": [0.1 + 0.7**t for t in range(steps)],
        "rising": [1.0 + t for t in range(steps)],
        "a burst": [20.0] + [1.0] * (steps - 1),
    }[kind]


@pytest.mark.parametrize("kind", ["constant", "falling", "rising", "a burst"])
@pytest.mark.parametrize("rising_for", [0, 3, 30, 70])
def test_auto_freezes_exactly_when_the_published_rule_says(kind, rising_for):
    steps, b2 = 120, 0.9
    rates = [1e-3 * min(t + 1, rising_for + 1) for t in range(steps)]
    shapes = [(3, 4), (5,)]
    g = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in shapes]
    opt = APMSqueeze(parameters, betas=(0.5, b2), warmup_steps="auto")
    opt.attached = True
    v, v_sums, expected, seen = [torch.zeros(s, dtype=torch.float64) for s in shapes], [], None, None
    for step, size in enumerate(gradient_sizes(kind, steps)):
        for i, p in enumerate(parameters):
            p.grad = size * torch.randn(p.shape, generator=g, dtype=torch.float64)
            v[i] = b2 * v[i] + (1 - b2) * p.grad**2
        v_sums.append(sum(x.sum().item() for x in v))
        if expected is None and settled(v_sums, rates, b2):
            expected = step + 1
        opt.param_groups[0]["lr"] = rates[step]
        opt.step()
        if seen is None and opt.frozen:
            seen = step + 1
        assert (seen is None) == (expected is None)
    assert seen == expected == opt.param_groups[0]["frozen_at"]
    assert seen > max(10, rising_for)


def test_auto_waits_for_a_falling_variance_longer_than_for_a_constant_one():
    frozen_at = {}
    for kind in ("constant", "falling"):
        p = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
        opt = APMSqueeze([p], betas=(0.5, 0.9), warmup_steps="auto")
        opt.attached = True
        for size in gradient_sizes(kind, 120):
            p.grad = torch.full_like(p, size)
            opt.step()
        frozen_at[kind] = opt.param_groups[0]["frozen_at"]
    assert frozen_at["constant"] == 11
    assert frozen_at["falling"] > 20


def test_v_stays_as_it_is_after_the_freeze():
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
    opt = APMSqueeze([p], warmup_steps=2)
    opt.attached = True
    for step in range(6):
        p.grad = torch.full_like(p, 1.0 + step)
        opt.step()
        if step == 1:
            spread = opt.state[p]["spread"].clone()
    assert torch.equal(opt.state[p]["spread"], spread)
    assert "exp_avg_sq" not in opt.state[p]
    assert torch.equal(opt.state[p]["exp_avg"], p.grad)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("v_floor", -1.0),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("warmup_steps", 0),
        ("warmup_steps", -3),
        ("warmup_steps", 2.5),
        ("warmup_steps", "never"),
    ],
)
def test_bad_options_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key} must be"):
        APMSqueeze([torch.nn.Parameter(torch.ones(1))], **{key: value})


@pytest.mark.parametrize("exchange", ["no-such-method", "acp:rnk=2", 3])
def test_a_bad_exchange_is_refused(exchange):
    with pytest.raises(ValueError, match=r"no-such-method|rnk|int"):
        APMSqueeze([torch.nn.Parameter(torch.ones(1))], exchange=exchange)


def test_a_warm_up_shorter_than_the_run_that_it_resumes_is_over_at_once():
    p = torch.nn.Parameter(torch.ones(3))
    long, short = APMSqueeze([p], warmup_steps=100), APMSqueeze([p], warmup_steps=5)
    for opt in (*[long] * 10, short):
        if opt is short:
            short.load_state_dict(long.state_dict())
        p.grad = torch.ones(3)
        opt.step()
    assert short.frozen


def test_past_the_warm_up_it_must_be_attached():
    p = torch.nn.Parameter(torch.ones(3))
    opt = APMSqueeze([p], warmup_steps=1)
    p.grad = torch.ones(3)
    opt.step()
    with pytest.raises(RuntimeError, match="attach"):
        opt.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exchange": "dist-ef-block:momentum=0.9"}, "of its own"),
        ({"betas": (0.9,)}, "two numbers"),
        ({"warmup_steps": True}, "warmup_steps"),
    ],
)
def test_what_would_be_ignored_or_doubled_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        APMSqueeze([torch.nn.Parameter(torch.ones(1))], **options)


def test_betas_are_one_for_all_groups():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "betas": (0.5, 0.5)}]
    with pytest.raises(ValueError, match="betas must be the same"):
        APMSqueeze(groups)
