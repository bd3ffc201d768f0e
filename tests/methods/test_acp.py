from __future__ import annotations

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.core.method import Context

torch.set_num_threads(1)

SHAPES = {"tall": (20, 8), "wide": (7, 30), "conv": (12, 3, 3, 3), "bias": (20,)}
LOW_RANK = ("tall", "wide", "conv")


class Paper:
    """Algorithm 1 of arXiv 2306.08881 for one matrix and all workers, in float64."""

    def __init__(self, P: torch.Tensor, Q: torch.Tensor, workers: int) -> None:
        self.P, self.Q = P.numpy(), Q.numpy()
        self.E = [np.zeros((P.shape[0], Q.shape[0])) for _ in range(workers)]
        self.t = 0

    def step(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        even = self.t % 2 == 0
        basis = np.linalg.qr(self.Q if even else self.P)[0]
        factors = []
        for i, gradient in enumerate(gradients):
            M = gradient.numpy().reshape(self.E[i].shape)
            factor = (M + self.E[i]) @ basis if even else (M + self.E[i]).T @ basis
            self.E[i] = self.E[i] + M - (factor @ basis.T if even else basis @ factor.T)
            factors.append(factor)
        mean = sum(factors) / len(factors)
        self.P, self.Q = (mean, basis) if even else (basis, mean)
        self.t += 1
        return torch.from_numpy(self.P @ self.Q.T).view(gradients[0].shape)


def gradients(workers, step, shapes=SHAPES):
    g = torch.Generator().manual_seed(step)
    return [{n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()} for _ in range(workers)]


def mean_of(inputs, name):
    return torch.stack([x[name] for x in inputs]).mean(0)


def mean_error(sim, name):
    return torch.stack([s[name].error for s in sim.states]).mean(0)


def initial(sim, name, shape, rank=0):
    state = sim.method.init(torch.zeros(shape, dtype=torch.float64), Context(0, name, rank, sim.workers, sim.seed))
    return state.inner.P, state.inner.Q


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_every_step_is_the_papers(workers, rank):
    sim = tw.Simulation(f"acp:rank={rank}", workers, seed=5)
    paper = {name: Paper(*initial(sim, name, SHAPES[name]), workers) for name in LOW_RANK}
    for step in range(6):
        inputs = gradients(workers, step)
        outs = sim.reduce(inputs)
        for name in LOW_RANK:
            close(outs[0][name], paper[name].step([x[name] for x in inputs]))
            for r in range(workers):
                close(sim.states[r][name].error.flatten(1), torch.from_numpy(paper[name].E[r]))
        close(outs[0]["bias"], mean_of(inputs, "bias"), 1e-15)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_error_is_what_the_orthonormal_factor_cannot_see(workers):
    sim = tw.Simulation("acp:rank=2", workers)
    for step in range(4):
        sim.reduce(gradients(workers, step))
        for states in sim.states:
            for name in LOW_RANK:
                E, factors = states[name].error.flatten(1), states[name].inner
                seen = E @ factors.Q if step % 2 == 0 else factors.P.mT @ E
                assert E.abs().max() > 0.1
                close(seen, torch.zeros_like(seen), 1e-12)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_mean_input_plus_error_is_the_output_plus_the_new_mean_error(workers):
    sim = tw.Simulation("acp:rank=1", workers)
    owed = {name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in LOW_RANK}
    for step in range(5):
        inputs = gradients(workers, step)
        out = sim.reduce(inputs)[0]
        for name in LOW_RANK:
            close(mean_of(inputs, name) + owed[name], out[name] + mean_error(sim, name), 1e-12)
            factors = sim.states[0][name].inner
            close(out[name].flatten(1), factors.P @ factors.Q.mT, 1e-14)
            owed[name] = mean_error(sim, name)
            close(sim.owed()[name], owed[name], 1e-15)


@pytest.mark.parametrize("shape", [(5, 5), (5, 9), (9, 5), (4, 2, 3)])
@pytest.mark.parametrize("workers", [1, 3])
def test_full_rank_owes_nothing_after_two_steps_of_a_constant_gradient(shape, workers):
    sim = tw.Simulation("acp:rank=99,min_saving=0", workers)
    inputs = gradients(workers, 0, {"w": shape})
    first = sim.reduce(inputs)[0]["w"]
    wanted = mean_of(inputs, "w") + mean_error(sim, "w")
    second = sim.reduce(inputs)[0]["w"]
    close(second, wanted)
    close(first + second, 2 * mean_of(inputs, "w"))
    close(mean_error(sim, "w"), torch.zeros_like(second))


def test_turns_alternate_between_the_two_factors():
    sim = tw.Simulation("acp:rank=2", 3)
    for step in range(4):
        sim.reduce(gradients(3, step))
        orthonormal = {
            side: torch.allclose(factor.mT @ factor, torch.eye(2, dtype=torch.float64))
            for side, factor in zip("PQ", sim.states[0]["tall"].inner[:2], strict=True)
        }
        assert orthonormal == {"P": step % 2 == 1, "Q": step % 2 == 0}


def test_a_parameter_that_takes_part_every_other_step_still_alternates():
    sim = tw.Simulation("acp:rank=1", 3)
    paper = {name: Paper(*initial(sim, name, SHAPES[name]), 3) for name in ("tall", "wide")}
    for step in range(6):
        inputs = gradients(3, step, {n: SHAPES[n] for n in ("tall", "wide") if n == "wide" or step % 2})
        out = sim.reduce(inputs)[0]
        for name in inputs[0]:
            close(out[name], paper[name].step([x[name] for x in inputs]))


def test_initial_factors_depend_on_seed_and_name_but_not_on_the_worker():
    sim = tw.Simulation("acp:rank=2", 4, seed=1)
    P, Q = initial(sim, "a", (16, 16))
    for rank in range(1, 4):
        assert all(torch.equal(x, y) for x, y in zip((P, Q), initial(sim, "a", (16, 16), rank), strict=True))
    others = [initial(sim, "b", (16, 16)), initial(tw.Simulation("acp:rank=2", 4, seed=2), "a", (16, 16)), (Q, P)]
    for other in others:
        assert not any(torch.equal(x, y) for x, y in zip((P, Q), other, strict=True))


def test_factors_and_outputs_stay_bit_equal_on_all_workers():
    sim = tw.Simulation("acp:rank=2", 3)
    for step in range(4):
        outs = sim.reduce(gradients(3, step))
        for name in LOW_RANK:
            assert all(torch.equal(outs[0][name], out[name]) for out in outs)
            assert all(torch.equal(sim.states[0][name].inner.P, s[name].inner.P) for s in sim.states)
            assert all(torch.equal(sim.states[0][name].inner.Q, s[name].inner.Q) for s in sim.states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_gradient_gives_zero_and_leaves_the_method_alive(dtype):
    sim = tw.Simulation("acp:rank=2", 3)
    zero = [{"w": torch.zeros(16, 16, dtype=dtype)}] * 3
    for _ in range(4):
        assert not sim.reduce(zero)[0]["w"].any()
    assert all(s["w"].inner.P.isfinite().all() and s["w"].inner.Q.isfinite().all() for s in sim.states)
    inputs = [{n: x.to(dtype) for n, x in g.items()} for g in gradients(3, 0, {"w": (16, 16)})]
    total = torch.zeros(16, 16, dtype=dtype)
    for _ in range(2):
        total += sim.reduce(inputs)[0]["w"]
    assert total.norm() > 0.1
    close(total + sim.owed()["w"], 2 * mean_of(inputs, "w"), 1e-5)


@pytest.mark.parametrize("shape", [(4, 4), (6, 6), (2, 3, 1, 1), (5, 1), (1, 9)])
def test_a_matrix_that_would_not_halve_goes_dense_exactly(shape):
    sim = tw.Simulation("acp:rank=4", 4)
    inputs = gradients(4, 0, {"w": shape})
    out = sim.reduce(inputs)[0]["w"]
    close(out, mean_of(inputs, "w"), 1e-15)
    assert not sim.owed()["w"].any()


def test_the_rule_draws_the_line_at_half_the_bytes():
    (_, taken), (_, left) = (tw.price("acp:rank=4", {"w": shape}, 4, step=1)[0] for shape in [(8, 8), (8, 7)])
    assert taken == 2 * 3 * 4 * (8 * 4) // 4
    assert left == 2 * 3 * 4 * (8 * 7) // 4


@pytest.mark.parametrize("step", [0, 1, 2])
def test_one_all_reduce_a_step_carries_a_factor_of_each_matrix_and_every_vector(step):
    ((op, sent),) = tw.price("acp:rank=2", SHAPES, 4, step=step)
    rows, columns = 20 + 7 + 12, 8 + 30 + 27
    assert op == "all_reduce"
    assert sent == 2 * 3 * 4 * (2 * (rows if step % 2 == 0 else columns) + 20) // 4


def test_bytes_of_the_simulation_are_those_of_the_price_list():
    sim = tw.Simulation("acp:rank=2", 4)
    for step in range(3):
        before = sim.bytes_sent
        sim.reduce([{n: x.float() for n, x in g.items()} for g in gradients(4, step)])
        assert sim.bytes_sent - before == sum(sent for _, sent in tw.price("acp:rank=2", SHAPES, 4, step=step))


def test_bad_rank_is_refused_by_name():
    with pytest.raises(ValueError, match="rank must be at least 1, not 0"):
        tw.method("acp:rank=0")
