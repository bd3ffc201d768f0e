from __future__ import annotations

import copy
import io
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.methods.test_dist_ef_sgdm import assert_same_parameters, loss_of, network, parameters_of
from tests.methods.test_slowmo import ADAM, BATCH_NORM, PLAIN, SGD, Replicas
from thinwire.optim import BMUF, Gossip, LocalSGD, SlowMo
from thinwire.optim.gossip import Mixing
from thinwire.runtime import buckets
from thinwire.workloads.training import _mean

torch.set_num_threads(1)

TOPOLOGIES = ["ring", "exponential"]
WORLDS = range(1, 9)
every_graph = pytest.mark.parametrize(("topology", "world"), [(t, w) for t in TOPOLOGIES for w in WORLDS])


def rounds_of(topology, world):
    """Steps after which the graphs come round."""
    return max(1, math.ceil(math.log2(world))) if topology == "exponential" else 1


def matrix(topology, world, step):
    """Row i: what worker i takes of each worker, edge by edge."""
    graph = torch.zeros(world, world, dtype=torch.float64)
    for sender in range(world):
        away = [1, world - 1] if topology == "ring" else [2 ** (step % rounds_of(topology, world))]
        for receiver in {(sender + h) % world for h in away} | {sender}:
            graph[receiver, sender] = 1
    return graph / graph.sum(1, keepdim=True)


def mixed(topology, tensors, steps):
    """The workers' tensors after each step of mixing alone."""
    simulation = tw.Simulation(Mixing(topology), len(tensors))
    history = []
    for _ in range(steps):
        tensors = [out["x"] for out in simulation.reduce([{"x": x} for x in tensors])]
        history.append(torch.stack(tensors))
    return history


def realised(topology, world, steps):
    """The product of the mixings' matrices: with a unit vector for each worker, row i is what it ends up with."""
    return mixed(topology, list(torch.eye(world, dtype=torch.float64)), steps)[-1]


def test_by_hand():
    start = [torch.tensor([float(3 * rank)]) for rank in range(4)]
    assert mixed("ring", start, 1)[0].flatten().tolist() == [4.0, 3.0, 6.0, 5.0]
    first, second = (x.flatten().tolist() for x in mixed("exponential", start, 2))
    assert first == [4.5, 1.5, 4.5, 7.5]
    assert second == [4.5, 4.5, 4.5, 4.5]


@every_graph
def test_a_mixing_is_the_matrix_of_the_graph(topology, world):
    generator = torch.Generator().manual_seed(world)
    x = torch.randn(world, 3, 5, generator=generator, dtype=torch.float64)
    steps = 2 * rounds_of(topology, world) + 1
    wanted = x.flatten(1)
    for step, got in enumerate(mixed(topology, list(x), steps)):
        wanted = matrix(topology, world, step) @ wanted
        torch.testing.assert_close(got.flatten(1), wanted, rtol=1e-13, atol=1e-13)


@every_graph
def test_the_mean_over_workers_stays_and_so_do_push_sum_weights(topology, world):
    for step in range(1, 2 * rounds_of(topology, world) + 1):
        product = realised(topology, world, step)
        ones = torch.ones(world, dtype=torch.float64)
        torch.testing.assert_close(product.sum(0), ones, rtol=1e-14, atol=0)
        torch.testing.assert_close(product.sum(1), ones, rtol=1e-14, atol=0)
        assert (product >= 0).all()
    x = torch.randn(world, 1000, generator=torch.Generator().manual_seed(0))
    after = mixed(topology, list(x), 20)[-1]
    torch.testing.assert_close(after.mean(0), x.mean(0), rtol=0, atol=1e-6)


def factor(topology, world):
    """What disagreement is multiplied by when the graphs have come round, from the formulas."""
    angles = [math.pi * m / world for m in range(1, world)]
    if topology == "ring":
        return max(abs(math.cos(a) ** 2 if world == 2 else (1 + 2 * math.cos(2 * a)) / 3) for a in angles)
    size = 2 ** rounds_of(topology, world)
    return max(abs(math.sin(size * a) / (size * math.sin(a))) for a in angles)


@pytest.mark.parametrize(("topology", "world"), [(t, w) for t in TOPOLOGIES for w in range(2, 9)])
def test_disagreement_contracts_at_the_rate_of_the_spectral_gap(topology, world):
    rounds, rate = rounds_of(topology, world), factor(topology, world)
    apart = realised(topology, world, rounds) - 1 / world
    assert torch.linalg.matrix_norm(apart, 2).item() == pytest.approx(rate, rel=1e-12, abs=1e-12)

    slowest = torch.linalg.svd(apart).Vh[0][:, None]
    others = torch.randn(world, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for x in (slowest, others):
        for turn, later in enumerate(mixed(topology, list(x), 4 * rounds)[rounds - 1 :: rounds], 1):
            bound = rate**turn * disagreement(x).item()
            assert disagreement(later).item() <= bound * (1 + 1e-9) + 1e-12
            if x is slowest:
                assert disagreement(later).item() == pytest.approx(bound, rel=1e-9, abs=1e-12)


def disagreement(x):
    return (x - x.mean(0)).norm()


@pytest.mark.parametrize(("topology", "world"), [("ring", 2), ("ring", 3), ("exponential", 2), ("exponential", 8)])
def test_where_everybody_is_reached_all_have_the_mean(topology, world):
    x = torch.randn(world, 100, generator=torch.Generator().manual_seed(2))
    last = mixed(topology, list(x), rounds_of(topology, world))[-1]
    torch.testing.assert_close(last[0], x.mean(0))
    if world < 4:
        assert all(torch.equal(last[0], other) for other in last), "in order of rank, so to the bit"


@pytest.mark.parametrize(
    ("topology", "world", "models"),
    [
        *(("ring", world, models) for world, models in ((1, 0), (2, 1), (3, 2), (7, 2))),
        *(("exponential", world, models) for world, models in ((1, 0), (2, 1), (3, 1), (8, 1))),
    ],
)
def test_one_model_goes_to_each_neighbour_in_one_round(topology, world, models):
    for rank in range(world):
        for step in range(3):
            price = tw.price(Mixing(topology), {"w": (10, 7), "b": (3,)}, world, step, rank)
            assert price == ([("swap", models * 4 * 73)] if models else [])


def test_narrow_parameters_travel_in_their_own_type_and_are_summed_wide():
    x = [torch.tensor([1.0, 256.0], dtype=torch.bfloat16), torch.tensor([2.0, 1.0], dtype=torch.bfloat16)]
    simulation = tw.Simulation(Mixing("ring"), 3)
    outs = simulation.reduce([{"x": t} for t in (*x, x[1])])
    assert simulation.bytes_sent == 2 * 2 * 2
    assert all(out["x"].tolist() == [1.6640625, 86.0] for out in outs)


def test_a_bad_number_goes_to_the_neighbours_and_no_further_in_a_step():
    x = [torch.ones(2) for _ in range(5)]
    x[2][1] = float("inf")
    first, second = mixed("ring", x, 2)
    assert first.isfinite().all(1).tolist() == [True, False, False, False, True]
    assert not second.isfinite().all(1).any()
    assert first[:, 0].tolist() == [1.0] * 5


@dataclass(frozen=True)
class Case:
    topology: str = "ring"
    world: int = 2
    base: tuple[Any, dict[str, Any]] = SGD
    slow: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 8
    bucket: int = buckets.SIZE

    def optimizer(self, parameters):
        kind, options = self.base
        gossip = Gossip(kind(parameters, **options), self.topology)
        return self.slow(gossip, **{"period": 3} | self.options) if self.slow else gossip


CASES = {
    "alone": Case(world=1),
    "two": Case(base=PLAIN),
    "two by powers": Case("exponential", base=PLAIN),
    "three": Case(world=3),
    "three by powers": Case("exponential", world=3),
    "four": Case(world=4, bucket=400),
    "four by powers": Case("exponential", world=4, base=ADAM, bucket=400),
    "five": Case(world=5),
    "five by powers": Case("exponential", world=5, bucket=400),
    "slow": Case(world=4, slow=SlowMo, bucket=400),
    "slow by powers": Case("exponential", 3, ADAM, SlowMo, {"slow_momentum": 0.7, "slow_lr": 0.8, "buffers": "keep"}),
    "slow, averaged momenta": Case("exponential", 4, SGD, SlowMo, {"buffers": "average", "period": 4}),
    "local": Case("ring", 4, SGD, LocalSGD),
    "blocks": Case("exponential", 4, SGD, BMUF, {"block_momentum": 0.6}),
    "slow alone": Case(world=1, slow=SlowMo),
}


def attached(case, module):
    buckets.SIZE = case.bucket
    model = DDP(module, bucket_cap_mb=0.0005)
    opt = case.optimizer(model.parameters())
    return model, opt, tw.attach(model, opt, messages=1000)  # one for each bucket


def train(model, opt, rank, step):
    opt.zero_grad()
    loss_of(model, rank, step).backward()
    opt.step()


def _run_cases(rank, world, cases):
    results = {}
    for name, case in cases.items():
        model, opt, sync = attached(case, network())
        history = []
        for step in range(case.steps):
            train(model, opt, rank, step)
            history.append(parameters_of(model.module))
        stats = sync.stats()
        opt.meet()
        results[name] = {"history": history, "stats": stats, "end": parameters_of(model.module)}
    return results


@pytest.fixture(scope="module")
def runs():
    found = {}
    for world in sorted({case.world for case in CASES.values()}):
        mine = {name: case for name, case in CASES.items() if case.world == world}
        ranks = workers.run(_run_cases, world, mine)
        found |= {name: [result[name] for result in ranks] for name in mine}
    return found


def paper_run(case):
    """The algorithm for all workers, every step of which is mixed: their parameters after each step."""
    option = {"period": 3, "slow_momentum": 0.5, "slow_lr": 1.0, "buffers": "reset"} | case.options
    beta = {LocalSGD: 0.0, BMUF: option.get("block_momentum")}.get(case.slow, option["slow_momentum"])
    if case.slow is LocalSGD:
        option["buffers"] = "keep"
    everyone, history = Replicas(case), []
    start = everyone.parameters()[0]
    u = {name: torch.zeros_like(value) for name, value in start.items()}
    for step in range(case.steps):
        everyone.step(step, case.base[1]["lr"])
        ended = everyone.parameters()
        graph = matrix(case.topology, case.world, step)
        for rank, model in enumerate(everyone.models):
            model.load_state_dict({n: sum(graph[rank, j] * own[n] for j, own in enumerate(ended)) for n in start})
        if case.slow and (step + 1) % option["period"] == 0:
            for name in start:
                mean = sum(own[name] for own in everyone.parameters()) / case.world
                u[name] = beta * u[name] + start[name] - mean  # in units of the rate, which does not change
                start[name] = start[name] - option["slow_lr"] * u[name]
            everyone.put(start)
            everyone.treat(option["buffers"])
        history.append(everyone.parameters())
    return history


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_the_mixing_matrix_times_the_workers_own_steps(runs, name):
    for step, wanted in enumerate(paper_run(CASES[name])):
        for rank, own in enumerate(wanted):
            assert_same_parameters(runs[name][rank]["history"][step], own, 1e-10)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.slow])
def test_all_end_with_the_mean_of_their_parameters(runs, name):
    ends, lasts = ([run["end"] for run in runs[name]], [run["history"][-1] for run in runs[name]])
    for parameter in ends[0]:
        assert all(torch.equal(end[parameter], ends[0][parameter]) for end in ends)
        mean = sum(last[parameter] for last in lasts) / len(lasts)
        torch.testing.assert_close(ends[0][parameter], mean, rtol=1e-13, atol=1e-14)
        apart = any(not torch.equal(last[parameter], lasts[0][parameter]) for last in lasts)
        assert apart == (CASES[name].world > 3 or name == "three by powers")


@pytest.mark.parametrize("name", CASES)
def test_metered_bytes_are_a_model_to_each_neighbour(runs, name):
    case = CASES[name]
    numbers = sum(p.numel() for p in network().parameters())
    period = case.options.get("period", 3)
    averages = case.steps // period if case.slow else 0
    model = {1: 0, 2: 1}.get(case.world, 2 if case.topology == "ring" else 1) * 8 * numbers
    ring = 2 * (case.world - 1) / case.world * 8 * numbers * (2 if case.options.get("buffers") == "average" else 1)
    for run in runs[name]:
        stats = run["stats"]
        assert stats["steps"] == case.steps
        sent = (case.steps - averages) * model + averages * ring
        assert stats["bytes_sent"] == (sent if not averages else pytest.approx(sent, rel=1e-3))
    if case.world > 1 and not case.slow:
        assert (runs[name][0]["stats"]["collectives"] == case.steps) == (case.bucket != 400)


def test_two_workers_are_synchronous_sgd(runs):
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(CASES["two"].steps):
        opt.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(2)) / 2).backward()
        opt.step()
        for name in ("two", "two by powers"):
            assert_same_parameters(runs[name][0]["history"][step], parameters_of(model), 1e-14)


def _quadratic(rank, world, topology):
    """1/2 |A_r (x - c_r)|^2 on worker r: the workers' own minima differ, and lie off that of the mean."""
    model = nn.Linear(1, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    model = DDP(model)
    opt = Gossip(torch.optim.SGD(model.parameters(), lr=0.3), topology)
    tw.attach(model, opt)
    scale, minimum = quadratic_of(rank)
    for step in range(400):
        opt.param_groups[0]["lr"] = 0.3 / (1 + step / 7)
        opt.zero_grad()
        (0.5 * (scale * (model(torch.ones(1, dtype=torch.float64)) - minimum)).square().sum()).backward()
        opt.step()
    return model.module.weight.detach().flatten()


def quadratic_of(rank):
    generator = torch.Generator().manual_seed(rank)
    scale = 0.5 + torch.rand(3, generator=generator, dtype=torch.float64)
    return scale, 3 * torch.randn(3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_workers_that_disagree_find_the_minimum_of_the_mean(topology):
    problems = [quadratic_of(rank) for rank in range(5)]
    weight = sum(scale**2 for scale, _ in problems)
    minimum = sum(scale**2 * c for scale, c in problems) / weight
    apart = min((c - minimum).norm() for _, c in problems)
    for x in workers.run(_quadratic, 5, topology):
        assert (x - minimum).norm() < 0.03 * apart  # their minima pull by the rate, which falls


def _resumed(rank, world, case, stop):
    """Straight through, and by way of a file at ``stop``, both with running statistics."""
    outcomes = []
    for stops in ((), (stop,)):
        torch.manual_seed(0)
        model, opt, sync = attached(case, nn.Sequential(*copy.deepcopy(BATCH_NORM)).double())
        for step in range(case.steps):
            if step in stops:
                file = io.BytesIO()
                torch.save([model.module.state_dict(), opt.state_dict(), sync.state_dict()], file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model, opt, sync = attached(case, copy.deepcopy(model.module))
                for part, state in zip((model.module, opt, sync), saved, strict=True):
                    part.load_state_dict(state)
            train(model, opt, rank, step)
        outcomes.append({name: value.clone() for name, value in model.module.state_dict().items()})
        opt.meet()
        outcomes[-1]["statistics"] = model.module[1].running_mean.clone()
    return outcomes


@pytest.mark.parametrize("name", ["four", "three by powers", "four by powers", "slow by powers"])
def test_saved_and_resumed_is_as_if_never_stopped(name):
    ranks = workers.run(_resumed, CASES[name].world, CASES[name], 4)
    for through, stopped in ranks:
        assert all(torch.equal(through[n], stopped[n]) for n in through)
    (first, _), (second, _) = ranks[:2]
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"]), "statistics are a worker's own ..."
    assert torch.equal(first["statistics"], second["statistics"]), "... until all meet"


def _misattached(rank, world):
    messages = []
    for mistake in ("differ", "differ below", "state"):
        model = DDP(network())
        topology = TOPOLOGIES[rank if mistake != "state" else 0]
        opt = Gossip(torch.optim.SGD(model.parameters(), lr=0.1), topology)
        try:
            sync = tw.attach(model, SlowMo(opt) if mistake == "differ below" else opt)
            other = sync.state_dict() | {"method": "Mixing(topology='exponential')"}
            sync.load_state_dict(other)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_workers_that_differ_are_named():
    for differ, below, state in workers.run(_misattached, 2):
        assert "'ring'" in differ and "'exponential'" in differ
        assert "SlowMo" in below and "'ring'" in below and "'exponential'" in below
        assert "another method" in state


def test_a_schedule_drives_the_base_and_a_state_is_the_bases():
    x = nn.Parameter(torch.ones(2))
    opt = Gossip(torch.optim.SGD([x], lr=0.5, momentum=0.9))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    opt.workers = Alone()
    for rate in (0.5, 0.25, 0.125):
        assert opt.base.param_groups[0]["lr"] == rate
        x.grad = torch.ones(2)
        opt.step()
        schedule.step()
    momentum = opt.state[x]["momentum_buffer"].clone()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.param_groups is opt.base.param_groups and opt.state is opt.base.state
    assert torch.equal(opt.state[x]["momentum_buffer"], momentum)


class Alone:
    def average(self, tensors, exact=(), method=None):
        return {p: x.clone() for p, x in tensors.items()}


def test_a_closure_is_evaluated_once():
    x, calls = nn.Parameter(torch.ones(2)), []
    opt = Gossip(torch.optim.SGD([x], lr=0.5))
    opt.workers = Alone()

    def closure():
        calls.append(1)
        opt.zero_grad()
        loss = x.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 2.0
    assert calls == [1] and x.tolist() == [0.0, 0.0]


def test_at_another_number_of_workers_all_start_from_the_mean():
    models = [{"x": torch.tensor([float(n)]), "n": torch.tensor(7 + n), "same": torch.tensor([0.1])} for n in (1, 2, 6)]
    mean = _mean(models)
    assert (mean["x"].item(), mean["n"].item()) == (3.0, 8)
    assert torch.equal(mean["same"], models[0]["same"]), "to the bit"


def test_bad_options_are_refused_by_name():
    x = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="topology must be one of ring, exponential, not 'star'"):
        Gossip(torch.optim.SGD(x), "star")
    for base in (SlowMo(torch.optim.SGD(x)), Gossip(torch.optim.SGD(x)), tw.optim.DistEFBlockSGDM(x)):
        with pytest.raises(ValueError, match=f"base must step by itself: {type(base).__name__}"):
            Gossip(base)


def test_it_must_be_attached():
    for method in ("step", "meet"):
        with pytest.raises(RuntimeError, match="attach"):
            getattr(Gossip(torch.optim.SGD([nn.Parameter(torch.ones(1))])), method)()
