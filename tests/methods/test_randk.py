from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.core.method import Context
from thinwire.methods.randk import chosen

torch.set_num_threads(1)


@pytest.mark.parametrize(("d", "k"), [(1, 1), (7, 7), (10, 3), (10, 4), (1000, 10), (1001, 333)])
def test_the_places_differ_from_each_other_and_from_step_to_step(d, k):
    ctx = Context(name="w", seed=5)
    draws = [chosen(torch.empty(d), k, ctx._replace(step=step)) for step in range(20)]
    for places in draws:
        assert len(set(places.tolist())) == k
        assert places.min() >= 0 and places.max() < d
    assert len({tuple(sorted(places.tolist())) for places in draws}) > 1 or k == d


def test_workers_agree_on_the_places_and_tensors_and_seeds_do_not():
    ctx = Context(step=3, name="w", seed=5, world=4)
    first = chosen(torch.empty(1000), 50, ctx)
    assert torch.equal(first, chosen(torch.empty(1000), 50, ctx._replace(rank=2)))
    for other in (ctx._replace(name="v"), ctx._replace(seed=6), ctx._replace(step=4)):
        assert not torch.equal(first, chosen(torch.empty(1000), 50, other))


@pytest.mark.parametrize(("d", "k"), [(10, 3), (11, 7), (12, 4)])
def test_every_place_has_the_same_chance(d, k):
    draws, counts = 6000, torch.zeros(d)
    for step in range(draws):
        counts[chosen(torch.empty(d), k, Context(step=step))] += 1
    p = k / d
    assert ((counts / draws - p).abs() < 5 * (p * (1 - p) / draws) ** 0.5).all(), counts / draws


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_mean_at_the_places_and_the_rest_kept(workers):
    sim = tw.Simulation("randk:ratio=0.1", workers, seed=3)
    error = [torch.zeros(77, dtype=torch.float64) for _ in range(workers)]
    for step in range(5):
        g = torch.Generator().manual_seed(step)
        inputs = [torch.randn(7, 11, generator=g, dtype=torch.float64) for _ in range(workers)]
        places = chosen(torch.empty(77), 8, Context(step=step, name="w", seed=3))
        p = [e + x.flatten() for e, x in zip(error, inputs, strict=True)]
        want = torch.zeros(77, dtype=torch.float64)
        want[places] = torch.stack(p).mean(0)[places]
        for worker in p:
            worker[places] = 0
        error = p
        out = sim.reduce([{"w": x} for x in inputs])[0]["w"]
        torch.testing.assert_close(out.flatten(), want, rtol=1e-12, atol=1e-12)
    for state, e in zip(sim.states, error, strict=True):
        torch.testing.assert_close(state["w"].error.flatten(), e, rtol=1e-12, atol=1e-12)


def test_the_error_is_what_the_paper_expects():
    """E|p - p[S]|^2 = (1 - k/d) |p|^2, with one worker and no memory yet."""
    x, left = torch.randn(200, generator=torch.Generator().manual_seed(0)), []
    for seed in range(2000):
        out = tw.Simulation("randk:ratio=0.1", 1, seed=seed).reduce([{"w": x}])[0]["w"]
        left.append(((x - out).norm() / x.norm()) ** 2)
    left = torch.stack(left)
    assert abs(left.mean() - 0.9) < 5 * left.std() / len(left) ** 0.5


@pytest.mark.parametrize("workers", [2, 8])
def test_values_alone_travel_and_are_summed_on_the_way(workers):
    assert tw.price("randk:ratio=0.01", {"w": (100, 100)}, workers) == [
        ("all_reduce", int(2 * (workers - 1) / workers * 100 * 4))
    ]
