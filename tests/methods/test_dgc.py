from __future__ import annotations

import itertools
import math

import pytest
import torch

import thinwire as tw
from tests.methods.test_topk import places
from thinwire.methods.dgc import DGC

torch.set_num_threads(1)


class Paper:
    """Algorithm 4 of arXiv 1712.01887 for one tensor, in float64."""

    def __init__(self, d, workers, mu, clip):
        self.u = [torch.zeros(d, dtype=torch.float64) for _ in range(workers)]
        self.v = [torch.zeros(d, dtype=torch.float64) for _ in range(workers)]
        self.mu, self.limit = mu, clip / math.sqrt(workers) if clip else math.inf

    def step(self, inputs, k):
        out = torch.zeros_like(self.u[0])
        for i, x in enumerate(inputs):
            g = x.flatten()
            g = g * min(1.0, self.limit / g.norm().item())
            self.u[i] = self.mu * self.u[i] + g
            self.v[i] = self.v[i] + self.u[i]
            for j in places(self.v[i].tolist(), k):
                out[j] += self.v[i][j] / len(inputs)
                self.u[i][j] = self.v[i][j] = 0
        return out.view(inputs[0].shape)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("clip", [0.0, 5.0])
def test_it_is_the_papers_algorithm(workers, mu, clip):
    spec = f"dgc:ratio=0.05,momentum={mu},clip={clip},warmup_steps=4,min_saving=0"
    sim, paper = tw.Simulation(spec, workers), Paper(77, workers, mu, clip)
    for step, k in enumerate([20, 13, 9, 6, 4, 4, 4]):
        g = torch.Generator().manual_seed(step)
        inputs = [torch.randn(7, 11, generator=g, dtype=torch.float64) for _ in range(workers)]
        out = sim.reduce([{"w": x} for x in inputs])[0]["w"]
        torch.testing.assert_close(out, paper.step(inputs, k), rtol=1e-12, atol=1e-12)
    for rank in range(workers):
        state = sim.states[rank]["w"]
        if mu:
            torch.testing.assert_close(state.momentum.flatten(), paper.u[rank], rtol=1e-12, atol=1e-12)
        error = state.inner.error if mu else state.error
        torch.testing.assert_close(error.flatten(), paper.v[rank], rtol=1e-12, atol=1e-12)


def test_by_hand():
    """One of four is sent. Where it was, momentum and residual start anew; elsewhere both go on."""
    sim = tw.Simulation("dgc:ratio=0.25,momentum=0.5,warmup_steps=0,min_saving=0", 1)
    g = torch.tensor([4.0, 3.0, 2.0, 0.0])
    assert sim.reduce([{"w": g}])[0]["w"].tolist() == [4, 0, 0, 0]
    # u = (4, 4.5, 3, 0): the first had no momentum left;   v = (4, 7.5, 5, 0)
    assert sim.reduce([{"w": g}])[0]["w"].tolist() == [0, 7.5, 0, 0]
    # u = (6, 3, 3.5, 0);   v = (10, 3, 8.5, 0)
    assert sim.reduce([{"w": g}])[0]["w"].tolist() == [10, 0, 0, 0]
    state = sim.states[0]["w"]
    assert state.momentum.tolist() == [0, 3, 3.5, 0]
    assert state.inner.error.tolist() == [0, 3, 8.5, 0]


def test_each_worker_keeps_what_it_does_not_send():
    """before == sent + after, per worker: v + u of this step, of which the sent coordinates are gone from both."""
    sim = tw.Simulation("dgc:ratio=0.1,momentum=0.9,warmup_steps=0", 1)
    v, u = torch.zeros(200, dtype=torch.float64), torch.zeros(200, dtype=torch.float64)
    for step in range(5):
        x = torch.randn(200, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        u = 0.9 * u + x
        sent = sim.reduce([{"w": x}])[0]["w"]
        state = sim.states[0]["w"]
        torch.testing.assert_close(sent + state.inner.error, v + u)
        assert not (state.momentum[sent != 0].any() or state.inner.error[sent != 0].any())
        u, v = state.momentum.clone(), state.inner.error.clone()


def test_the_density_falls_exponentially_from_a_quarter():
    dgc = DGC(ratio=0.001, warmup_steps=4)
    densities = [dgc.density(step) for step in range(6)]
    assert densities[0] == 0.25
    assert densities[4:] == [0.001, 0.001]
    ratios = [b / a for a, b in itertools.pairwise(densities[:5])]
    assert all(math.isclose(r, ratios[0]) for r in ratios)
    assert [DGC(ratio=0.5, warmup_steps=4).density(step) for step in range(5)] == [0.5] * 5
    assert DGC(ratio=0.01, warmup_steps=0).density(0) == 0.01


@pytest.mark.parametrize("workers", [2, 4])
def test_each_step_of_the_warm_up_has_its_price(workers):
    dgc = DGC(ratio=0.001, warmup_steps=5)
    for step in range(7):
        k = max(1, math.ceil(dgc.density(step) * 10_000))
        assert tw.price(dgc, {"w": (100, 100)}, workers, step=step) == [("all_gather", (workers - 1) * k * 6)]
    assert tw.price(dgc, {"w": (100, 100)}, workers) == [("all_gather", (workers - 1) * 10 * 6)]


@pytest.mark.parametrize("spec", ["dgc:min_size=1000", "dgc:after=10"])
def test_dense_tensors_and_dense_steps_have_the_momentum_of_sgd(spec):
    sim, u = tw.Simulation(spec, 2), torch.zeros(10, 10)
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        inputs = [torch.randn(10, 10, generator=g) for _ in range(2)]
        u = 0.9 * u + torch.stack(inputs).mean(0)
        torch.testing.assert_close(sim.reduce([{"w": x} for x in inputs])[0]["w"], u)


def test_a_rate_of_zero_spends_nothing():
    sim = tw.Simulation("dgc:ratio=0.25,momentum=0.5,warmup_steps=0,min_saving=0", 1)
    sim.reduce([{"w": torch.tensor([4.0, 3.0, 2.0, 0.0])}], lr=0.1)
    sim.reduce([{"w": torch.tensor([1.0, 9.0, 1.0, 1.0])}], lr=0.0)
    state = sim.states[0]["w"]
    assert state.inner.error.tolist() == [0, 3, 2, 0]
    assert state.momentum.tolist() == [1, 10.5, 2, 1]


@pytest.mark.parametrize("option", ["momentum=1", "momentum=-0.1", "clip=-1", "clip=nan", "warmup_steps=-1"])
def test_a_bad_option_is_named(option):
    with pytest.raises(ValueError, match=option.partition("=")[0]):
        tw.method(f"dgc:{option}")
