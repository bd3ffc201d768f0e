from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.core.method import Context
from thinwire.methods.powersgd import PowerSGD

torch.set_num_threads(1)

SHAPES = {"tall": (20, 8), "wide": (9, 30), "conv": (12, 3, 3, 3), "bias": (20,)}
LOW_RANK = ("tall", "wide", "conv")


class Paper:
    """Algorithm 1 of arXiv 1905.13727 for one matrix and all workers, in float64, with each worker's own error."""

    def __init__(self, Q: torch.Tensor, shape: tuple[int, ...], workers: int) -> None:
        self.Q = Q.numpy()
        self.E = [np.zeros((shape[0], self.Q.shape[0])) for _ in range(workers)]

    def step(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        D = [g.numpy().reshape(e.shape) + e for g, e in zip(gradients, self.E, strict=True)]
        P = np.linalg.qr(np.mean([d @ self.Q for d in D], axis=0))[0]
        Q = [d.T @ P for d in D]
        self.E = [d - P @ q.T for d, q in zip(D, Q, strict=True)]
        self.Q = np.mean(Q, axis=0)
        return torch.from_numpy(P @ self.Q.T).view(gradients[0].shape)


def gradients(workers, step, shapes=SHAPES):
    g = torch.Generator().manual_seed(step)
    return [{n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()} for _ in range(workers)]


def mean_of(inputs, name):
    return torch.stack([x[name] for x in inputs]).mean(0)


def mean_error(sim, name):
    return torch.stack([s[name].error for s in sim.states]).mean(0)


def initial(sim, name, shape, rank=0):
    like = torch.zeros(shape, dtype=torch.float64)
    return sim.method.init(like, Context(0, name, rank, sim.workers, sim.seed)).inner.Q


def with_spectrum(n, m, values):
    """A matrix with these singular values."""
    g = torch.Generator().manual_seed(7)
    U = torch.linalg.qr(torch.randn(n, len(values), generator=g, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(m, len(values), generator=g, dtype=torch.float64)).Q
    return U, (U * torch.tensor(values, dtype=torch.float64)) @ V.mT


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_every_step_is_the_papers(workers, rank):
    sim = tw.Simulation(f"powersgd:rank={rank}", workers, seed=5)
    paper = {name: Paper(initial(sim, name, SHAPES[name]), SHAPES[name], workers) for name in LOW_RANK}
    for step in range(6):
        inputs = gradients(workers, step)
        outs = sim.reduce(inputs)
        for name in LOW_RANK:
            close(outs[0][name], paper[name].step([x[name] for x in inputs]))
            for r in range(workers):
                close(sim.states[r][name].error.flatten(1), torch.from_numpy(paper[name].E[r]))
        close(outs[0]["bias"], mean_of(inputs, "bias"), 1e-15)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_no_gradient_is_lost_between_output_and_errors(workers):
    sim = tw.Simulation("powersgd:rank=1", workers)
    total = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in LOW_RANK}
    applied = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in LOW_RANK}
    for step in range(5):
        inputs = gradients(workers, step)
        out = sim.reduce(inputs)[0]
        for name in LOW_RANK:
            total[name] += mean_of(inputs, name)
            applied[name] += out[name]
            close(total[name], applied[name] + mean_error(sim, name), 1e-12)
            close(sim.owed()[name], mean_error(sim, name), 1e-15)


def test_each_error_is_outside_the_shared_column_space():
    sim = tw.Simulation("powersgd:rank=2", 3)
    for step in range(3):
        out = sim.reduce(gradients(3, step))[0]["tall"]
        U = torch.linalg.svd(out).U[:, :2]
        for states in sim.states:
            assert states["tall"].error.norm() > 0.1
            close(U.mT @ states["tall"].error, torch.zeros(2, 8, dtype=torch.float64))


@pytest.mark.parametrize("rank", [1, 3])
def test_a_mean_of_the_methods_own_rank_passes_exactly_though_no_workers_gradient_has_it(rank):
    _, mean = with_spectrum(20, 12, [3.0, 2.0, 1.0][:rank])
    noise = gradients(3, 0, {"w": (20, 12)})
    inputs = [{"w": mean + x["w"] - mean_of(noise, "w")} for x in noise]
    sim = tw.Simulation(f"powersgd:rank={rank}", 3)
    for _ in range(4):
        close(sim.reduce(inputs)[0]["w"], mean)
    close(mean_error(sim, "w"), torch.zeros_like(mean))
    assert all(s["w"].error.norm() > 0.1 for s in sim.states)


def test_the_warm_start_finds_the_best_approximation_of_a_constant_gradient():
    U, M = with_spectrum(20, 12, [4.0, 3.0, 1.0, 0.5, 0.2])
    best = U[:, :2] @ U[:, :2].mT @ M
    without_feedback = tw.where(tw.Rule(), PowerSGD(rank=2))
    sim = tw.Simulation(without_feedback, 3)
    gaps = [(sim.reduce([{"w": M}] * 3)[0]["w"] - best).norm().item() for _ in range(30)]
    assert gaps[0] > 0.1
    assert gaps[-1] < 1e-10


def test_the_sum_of_outputs_follows_a_constant_gradient_of_any_rank():
    inputs = gradients(3, 0, {"w": (20, 12)})
    sim = tw.Simulation("powersgd:rank=1", 3)
    steps = 200
    applied = sum(sim.reduce(inputs)[0]["w"] for _ in range(steps))
    assert (applied / steps - mean_of(inputs, "w")).norm() < 0.1 * mean_of(inputs, "w").norm()


def test_the_initial_factor_depends_on_seed_and_name_but_not_on_the_worker():
    sim = tw.Simulation("powersgd:rank=2", 3, seed=1)
    Q = initial(sim, "a", (16, 16))
    assert all(torch.equal(Q, initial(sim, "a", (16, 16), rank)) for rank in (1, 2))
    assert not torch.equal(Q, initial(sim, "b", (16, 16)))
    assert not torch.equal(Q, initial(tw.Simulation("powersgd:rank=2", 3, seed=2), "a", (16, 16)))


def test_factor_and_outputs_stay_bit_equal_on_all_workers():
    sim = tw.Simulation("powersgd:rank=2", 3)
    for step in range(3):
        outs = sim.reduce(gradients(3, step))
        for name in LOW_RANK:
            assert all(torch.equal(outs[0][name], out[name]) for out in outs)
            assert all(torch.equal(sim.states[0][name].inner.Q, s[name].inner.Q) for s in sim.states)


def test_a_zero_gradient_gives_zero_and_leaves_the_method_alive():
    sim = tw.Simulation("powersgd:rank=2", 3)
    zero = torch.zeros(16, 16, dtype=torch.float64)
    for _ in range(3):
        assert not sim.reduce([{"w": zero}] * 3)[0]["w"].any()
    assert all(s["w"].inner.Q.isfinite().all() for s in sim.states)
    inputs = gradients(3, 0, {"w": (16, 16)})
    out = sim.reduce(inputs)[0]["w"]
    assert out.norm() > 0.1
    close(out + sim.owed()["w"], mean_of(inputs, "w"), 1e-12)


@pytest.mark.parametrize("shape", [(4, 4), (8, 12), (2, 3, 1, 1), (5, 1), (1, 9)])
def test_a_matrix_that_would_not_halve_goes_dense_exactly(shape):
    sim = tw.Simulation("powersgd:rank=4", 4)
    inputs = gradients(4, 0, {"w": shape})
    close(sim.reduce(inputs)[0]["w"], mean_of(inputs, "w"), 1e-15)
    assert not sim.owed()["w"].any()


@pytest.mark.parametrize("step", [0, 1])
def test_two_all_reduces_a_step_of_the_rows_then_of_the_columns(step):
    (first, rows), (second, columns) = tw.price("powersgd:rank=2", SHAPES, 4, step=step)
    assert (first, second) == ("all_reduce", "all_reduce")
    assert rows == 2 * 3 * 4 * (2 * (20 + 9 + 12) + 20) // 4
    assert columns == 2 * 3 * 4 * (2 * (8 + 30 + 27)) // 4


def test_acp_sends_half_of_it():
    shapes = {"w": (64, 64)}
    both = sum(sent for _, sent in tw.price("powersgd:rank=4", shapes, 4))
    one = sum(sent for _, sent in tw.price("acp:rank=4", shapes, 4))
    assert both == 2 * one


def test_bad_rank_is_refused_by_name():
    with pytest.raises(ValueError, match="rank must be at least 1, not -1"):
        tw.method("powersgd:rank=-1")
