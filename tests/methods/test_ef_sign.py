from __future__ import annotations

import pytest
import torch

import thinwire as tw

torch.set_num_threads(1)

ALL = "ef-sign:min_dims=0,min_saving=0"
SHAPES = {"w": (6, 11), "conv": (5, 2, 3, 3), "b": (17,)}


def scaled_sign(x):
    return x.abs().mean() * torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def gradients(workers, step, shapes=SHAPES):
    g = torch.Generator().manual_seed(step)
    return [{n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()} for _ in range(workers)]


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_each_tensor_is_the_papers_in_units_of_the_parameters(workers):
    """Algorithm 1 as written: p = gamma g + e, x -= C(p), e = p - C(p), with C averaged over the workers."""
    sim = tw.Simulation(ALL, workers)
    e = [{n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(workers)]
    for step, gamma in enumerate([0.1, 0.1, 0.05, 0.2, 0.02, 0.02]):
        inputs = gradients(workers, step)
        out = sim.reduce(inputs, lr=gamma)[0]
        for name in SHAPES:
            p = [gamma * x[name] + mine[name] for x, mine in zip(inputs, e, strict=True)]
            sent = [scaled_sign(x) for x in p]
            for mine, x, s in zip(e, p, sent, strict=True):
                mine[name] = x - s
            close(gamma * out[name], torch.stack(sent).mean(0))
            close(gamma * sim.owed()[name], torch.stack([mine[name] for mine in e]).mean(0))


def test_by_hand():
    sim = tw.Simulation(ALL, 2)
    out = sim.reduce([{"w": torch.tensor([3.0, -1.0, 0.0, 0.0])}, {"w": torch.tensor([-2.0, -2.0, 4.0, 0.0])}])[0]["w"]
    # scales 1 and 2; signs + - + + and - - + +
    assert out.tolist() == [-0.5, -1.5, 1.5, 1.5]
    assert sim.states[0]["w"].error.tolist() == [2.0, 0.0, -1.0, -1.0]
    assert sim.states[1]["w"].error.tolist() == [0.0, 0.0, 2.0, -2.0]


def test_the_learning_rates_ratio_is_bounded():
    outs = []
    for max_ratio in (10, 100):
        sim = tw.Simulation(f"{ALL},max_ratio={max_ratio}", 2)
        sim.reduce(gradients(2, 0), lr=1.0)
        outs.append(sim.reduce(gradients(2, 1), lr=0.01)[0]["w"])
    assert not torch.allclose(*outs)
    with pytest.raises(ValueError, match="max_ratio must be at least 1"):
        tw.method("ef-sign:max_ratio=0.5")


@pytest.mark.parametrize("workers", [2, 8, 31])
def test_a_bit_a_number_to_every_other_worker(workers):
    ((op, sent),) = tw.price("ef-sign", {"w": (256, 256)}, workers)
    assert (op, sent) == ("all_gather", (workers - 1) * (256 * 256 // 8 + 4))


def test_where_signs_would_not_halve_the_bytes_all_goes_dense():
    assert tw.price("ef-sign", {"w": (256, 256)}, 32) == tw.price("dense", {"w": (256, 256)}, 32)


def test_it_mends_the_papers_counter_example():
    """f = |x + y| / 2 + |x - y|: the gradient's signs always differ, so signs alone never change x + y."""

    def gradient(x):
        plus, minus = (1.0 if t >= 0 else -1.0 for t in (x.sum(), x[0] - x[1]))
        return plus / 2 * torch.tensor([1.0, 1.0]) + minus * torch.tensor([1.0, -1.0])

    x, plain, sim = torch.ones(2), torch.ones(2), tw.Simulation(ALL, 1)
    for step in range(400):
        lr = 0.2 / (1 + step / 10)
        x = x - lr * sim.reduce([{"x": gradient(x)}], lr=lr)[0]["x"]
        plain = plain - lr * gradient(plain).sign()
    assert plain.sum() == pytest.approx(2.0, abs=1e-4)
    assert x.norm() < 0.1
