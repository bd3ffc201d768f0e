from __future__ import annotations

import math

import pytest
import torch

import thinwire as tw
from thinwire.core.method import Context
from thinwire.methods.dq import DQ, DQState

torch.set_num_threads(1)


def run(options, norms, workers=2, d=64, block=64):
    """The bits of each step, read from the bytes, for gradients of flat magnitude with these norms."""
    sim, bits = tw.Simulation(DQ(block=block, **options), workers), []
    for step, norm in enumerate(norms):
        signs = [torch.randn(d, generator=torch.Generator().manual_seed(step * 10 + r)).sign() for r in range(workers)]
        before = sim.bytes_sent
        sim.reduce([{"w": norm / math.sqrt(d) * s} for s in signs])
        payload = (sim.bytes_sent - before) / (workers - 1) - 4 * -(-d // block)
        bits.append(payload * 8 / d)
    assert all(b == int(b) for b in bits)
    return bits


def test_a_targets_bits_by_hand():
    """s_n = alpha^((N-n)/2) |g| / sqrt(4 W target) levels a side, in 1 + log2(s + 1) bits, rounded up."""
    options = DQ(target=1 / 8, alpha=0.25, total_steps=10)
    for norm, step, wanted in [(7, 10, 4), (7.1, 10, 5), (14, 9, 4), (28, 8, 4), (6, 8, 3), (1e-9, 10, 2), (1e9, 0, 8)]:
        state = DQState(norm=math.log2(norm), seen=1)
        assert options.wanted(state, Context(step=step, world=2)) == wanted
    assert options.wanted(DQState(), Context(step=0, world=2)) == 8  # before a norm is known


def test_without_an_alpha_errors_fade_as_those_of_all_alphas_together():
    """The mean of alpha^k over alpha from 0 to 1 is 1 / (k + 1): half a bit more whenever half of the run is over."""
    options, grid = DQ(target=1e-4, total_steps=1023), torch.linspace(0, 1, 100_001, dtype=torch.float64)
    for left in (0, 1, 7, 50):
        mean = grid.pow(left).mean().item()
        assert options._faded(left) == pytest.approx(math.log2(mean) / 2, abs=1e-3)
    bits = run({"budget": 4.0, "total_steps": 1023}, [1.0] * 1023)
    early, late = (sum(bits[i : i + 32]) / 32 for i in (0, 1023 - 48))
    assert late - early == pytest.approx(math.log2(1023 / 32) / 2, abs=0.5)
    assert {3, 4} == set(bits[:300])  # fractions of a bit, in turns
    assert 3.05 < sum(bits[:300]) / 300 < 3.6


@pytest.mark.parametrize("workers", [1, 3])
def test_a_budgets_bits_are_rounded_so_that_their_sum_is_kept(workers):
    sim, wanted, options = (
        tw.Simulation(DQ(budget=3.3, total_steps=50, block=64), workers),
        0.0,
        DQ(budget=3.3, total_steps=50),
    )
    for step in range(50):
        state = sim.states[0].get("w", DQState())
        wanted += options.wanted(state, Context(step=step, world=workers))
        sim.reduce([{"w": torch.ones(64)}] * workers)
        assert abs(sim.states[0]["w"].spent - wanted) <= 0.5 + 1e-6


def test_the_norm_is_that_of_the_scales_with_which_all_workers_round():
    sim = tw.Simulation(DQ(block=8), 2)
    x = torch.tensor([3.0, *[1.0] * 7, -2.0, 1.0])  # blocks of 8 and 2 with largest magnitudes 3 and 2
    sim.reduce([{"w": x}, {"w": 0 * x}])
    wanted = math.log2((8 * 9 + 2 * 4) / 2) / 2
    assert sim.states[0]["w"].norm == pytest.approx(wanted)
    assert sim.states[0]["w"] == sim.states[1]["w"]


@pytest.mark.parametrize("workers", [1, 4])
def test_the_variance_stays_within_the_target(workers):
    g = torch.Generator().manual_seed(0)
    x = [{"w": torch.randn(300, dtype=torch.float64, generator=g)} for _ in range(workers)]
    mean = torch.stack([t["w"] for t in x]).mean(0)
    target, N = 0.5, 400
    sim, errors = tw.Simulation(DQ(target=target, alpha=0.99, total_steps=N, block=64), workers), []
    for _ in range(N):
        errors.append((sim.reduce(x)[0]["w"] - mean).square().sum().item())
    for first in range(0, N, 50):
        allowed = [target * 0.99 ** (n - N) for n in range(first, first + 50)]
        assert sum(errors[first : first + 50]) <= sum(allowed)
    assert sum(errors[-50:]) > target * 50 / 16  # and no more bits than that takes


@pytest.mark.parametrize("options", [{"budget": 4.0}, {"target": 1e-3}], ids=str)
def test_bits_rise_towards_the_end(options):
    bits = run({"alpha": 0.98, "total_steps": 200, **options}, [1.0] * 200)
    quarters = [sum(bits[i : i + 50]) / 50 for i in range(0 if "budget" in options else 1, 200, 50)][:4]
    assert quarters == sorted(quarters) and quarters[-1] >= quarters[0] + 1


@pytest.mark.parametrize("options", [{"budget": 4.0}, {"target": 1e-2}], ids=str)
def test_bits_fall_as_the_norm_falls(options):
    options = {"alpha": 1.0, "total_steps": 200, **options}
    steady = run(options, [4.0] * 60)
    fallen = run(options, [4.0] * 50 + [1.0] * 10)
    assert steady[:51] == fallen[:51]  # the norm is the last step's
    assert all(b <= a - 1 for a, b in zip(steady[52:], fallen[52:], strict=True))


@pytest.mark.parametrize("course", ["steady", "falling", "rising", "noisy"])
@pytest.mark.parametrize(("budget", "alpha", "steps"), [(4.0, 0.99, 300), (3.3, 0.95, 100), (6.0, 1.0, 100)])
def test_the_budget_is_kept_within_five_per_cent(budget, alpha, steps, course):
    g = torch.Generator().manual_seed(1)
    exponent = {
        "steady": lambda t: 0.0,
        "falling": lambda t: -4 * t,
        "rising": lambda t: 4 * t,
        "noisy": lambda t: torch.randn((), generator=g).item(),
    }[course]
    norms = [2 ** exponent(n / steps) for n in range(steps)]
    bits = run({"budget": budget, "alpha": alpha, "total_steps": steps}, norms)
    assert sum(bits) == pytest.approx(budget * steps, rel=0.05)


def test_all_ranks_choose_alike_though_their_gradients_differ():
    sim = tw.Simulation("dq:total_steps=20,alpha=0.9", 3)
    for step in range(20):
        g = torch.Generator().manual_seed(step)
        sim.reduce([{"w": 10**r * torch.randn(50, generator=g)} for r in range(3)])
        assert len({states["w"] for states in sim.states}) == 1


def test_with_a_constant_norm_the_price_is_what_is_metered():
    d, spec = 64, "dq:total_steps=30,alpha=0.9,block=64"
    bits = run({"total_steps": 30, "alpha": 0.9}, [1.0] * 30)
    assert len(set(bits)) >= 3
    for step in (0, 9, 19, 29):
        assert tw.price(spec, {"w": (d,)}, 2, step=step) == [("all_gather", int(d * bits[step] / 8) + 4)]
    assert tw.price(spec, {"w": (d,)}, 2) == [("all_gather", d * 4 // 8 + 4)]
    assert tw.price("dq:target=1,block=64", {"w": (d,)}, 2) == [("all_gather", d + 4)]


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize(("alpha", "gain"), [(0.81, 4), (0, 1.5)])
def test_at_equal_bits_it_ends_nearer_than_fixed_bits(alpha, gain, norm):
    """|x - a_i|^2 / 2 at a constant rate: what is left at the end is the noise of the last steps."""
    lr, steps, workers = 0.1, 60, 4
    left = {}
    for spec in (f"dq:budget=4,total_steps={steps},alpha={alpha},norm={norm}", f"qsgd:bits=4,norm={norm}"):
        left[spec] = 0.0
        for seed in range(5):
            g = torch.Generator().manual_seed(seed)
            targets = [torch.randn(512, generator=g) for _ in range(workers)]
            sim, x = tw.Simulation(spec, workers, seed=seed), torch.zeros(512)
            for _ in range(steps):
                x = x - lr * sim.reduce([{"w": x - a} for a in targets])[0]["w"]
            exact = (1 - (1 - lr) ** steps) * torch.stack(targets).mean(0)
            left[spec] += (x - exact).square().sum().item()
    ours, fixed = left.values()
    assert ours < fixed / gain


@pytest.mark.parametrize(
    "option",
    [
        "budget=1",
        "budget=9",
        "target=-1",
        "target=inf",
        "alpha=-0.1",
        "alpha=1.1",
        "total_steps=0",
        "block=3",
        "norm=1",
    ],
)
def test_bad_options_are_refused_by_name(option):
    with pytest.raises(ValueError, match=f"{option.partition('=')[0]} must be"):
        tw.method(f"dq:{option}")
