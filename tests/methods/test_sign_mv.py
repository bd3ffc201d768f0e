from __future__ import annotations

import pytest
import torch

import thinwire as tw

torch.set_num_threads(1)

SHAPES = {"w": (6, 11), "conv": (5, 2, 3, 3), "b": (17,), "s": ()}


def gradients(workers, step, shapes=SHAPES):
    g = torch.Generator().manual_seed(step)
    return [{n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()} for _ in range(workers)]


@pytest.mark.parametrize("workers", [1, 3, 5])
@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_the_majority_of_the_signs_of_momentum(mu, workers):
    sim = tw.Simulation(f"sign-mv:momentum={mu}", workers)
    m = [{n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(workers)]
    for step in range(6):
        inputs = gradients(workers, step)
        outs = sim.reduce(inputs)
        for name in SHAPES:
            for mine, x in zip(m, inputs, strict=True):
                mine[name] = mu * mine[name] + (1 - mu) * x[name]
            wanted = torch.sign(sum(torch.sign(mine[name]) for mine in m))
            assert all(torch.equal(out[name], wanted) for out in outs)


def test_by_hand_with_zeros_and_ties():
    """Where there is nothing to tell, places 0, 2 and 4 count as + at even steps, and 1 and 3 at odd ones."""
    votes = torch.tensor([[5.0, 1, 1, 0, 0], [5, 1, -1, 0, 0], [5, -1, 1, 0, 0], [-1, -1, -1, 0, -2]])
    sim = tw.Simulation("sign-mv:momentum=0", 4)
    for wanted in ([1, -1, 1, -1, 1], [1, 1, -1, 1, -1], [1, -1, 1, -1, 1]):
        assert sim.reduce([{"w": v} for v in votes])[0]["w"].tolist() == wanted


def test_what_has_no_gradient_does_not_drift():
    sim, x = tw.Simulation("sign-mv", 3), torch.zeros(20)
    for _ in range(100):
        x += sim.reduce([{"w": torch.zeros(20)}] * 3)[0]["w"]
        assert x.abs().max() <= 1


@pytest.mark.parametrize("workers", [1, 5])
def test_it_converges_to_a_median(workers):
    targets = gradients(workers, 3, {"w": (64,)})
    sim, x = tw.Simulation("sign-mv:momentum=0", workers), torch.zeros(64, dtype=torch.float64)
    for step in range(400):
        x = x - 0.2 / (1 + step / 10) * sim.reduce([{"w": x - t["w"]} for t in targets])[0]["w"]
    median = torch.stack([t["w"] for t in targets]).median(0).values
    assert (x - median).abs().max() < 0.02


def test_the_published_counter_example_does_not_converge():
    """f = |x + y| / 2 + |x - y|: the gradient's signs always differ, so x + y never changes."""

    def gradient(x):
        plus, minus = (1.0 if t >= 0 else -1.0 for t in (x.sum(), x[0] - x[1]))
        return plus / 2 * torch.tensor([1.0, 1.0]) + minus * torch.tensor([1.0, -1.0])

    x, sim = torch.ones(2), tw.Simulation("sign-mv:momentum=0", 1)
    for step in range(200):
        x = x - 0.2 / (1 + step / 10) * sim.reduce([{"x": gradient(x)}])[0]["x"]
    assert x.sum() == pytest.approx(2.0, abs=1e-4)


def uneven(x, drawn):
    """Of f = x / 4 on [-1, 1]: the rarer gradient is the larger."""
    return torch.full_like(x, 4.0 if drawn < 0.25 else -1.0)


def square(x, drawn):
    """Of f = <a, x>^2 + <b, x>^2, one of them at a time: the signs are always opposite, so x + y never changes."""
    a = torch.tensor([1.5, -0.5] if drawn < 0.5 else [-0.5, 1.5])
    return 4 * (a @ x) * a


def descended(gradient, start, spec, workers):
    generator, sim, x = torch.Generator().manual_seed(0), tw.Simulation(spec, workers), torch.tensor(start)
    for step in range(600):
        drawn = torch.rand(workers, generator=generator).tolist()
        lr = 0.05 / (1 + step / 10) ** 0.5
        x = (x - lr * sim.reduce([{"x": gradient(x, one)} for one in drawn], lr=lr)[0]["x"]).clamp(-1, 1)
    return x


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("gradient", "start", "wrong", "right"),
    [(uneven, [0.0], [1.0], [-1.0]), (square, [0.5, 0.5], [0.5, 0.5], [0.0, 0.0])],
)
def test_published_stochastic_examples_fail_by_signs_and_converge_with_error_feedback(
    gradient, start, wrong, right, workers
):
    failed = descended(gradient, start, "sign-mv:momentum=0", workers)
    assert failed.sum() == pytest.approx(sum(wrong), abs=0.1)
    for spec in ("dense", "ef-sign:min_dims=0,min_saving=0", "dist-ef"):
        found = descended(gradient, start, spec, workers)
        assert (found - torch.tensor(right)).abs().max() < 0.1, spec


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_is_seen_though_signs_hide_it(bad):
    sim = tw.Simulation("sign-mv", 3)
    inputs = gradients(3, 0)
    inputs[2]["w"][-1, -1] = bad
    outs = sim.reduce(inputs)
    assert all(out["w"].isnan().all() and out["b"].isfinite().all() for out in outs)
    assert not sim.states[2]["w"].momentum.any()


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_bit_each_way(workers):
    d = 8 * 1000 * workers
    (push, pull) = tw.price("sign-mv", {"w": (d,)}, workers)
    assert push == ("all_to_all", (workers - 1) * 1001)
    assert pull == ("all_gather", (workers - 1) * 1001)


@pytest.mark.parametrize("momentum", ["1", "-0.1", "nan"])
def test_bad_momentum_is_refused_by_name(momentum):
    with pytest.raises(ValueError, match="momentum must be"):
        tw.method(f"sign-mv:momentum={momentum}")
