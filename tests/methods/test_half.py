from __future__ import annotations

import pytest
import torch

import thinwire as tw

torch.set_num_threads(1)

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = {"w": (40, 7), "b": (5,), "scalar": ()}


def inputs_of(workers):
    g = torch.Generator().manual_seed(workers)
    return [{n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in SHAPES.items()} for _ in range(workers)]


def mean_of_rounded(tensors, half):
    """Each worker rounds, divides, rounds; the sum is taken here in float64."""
    return sum((x.to(half).double() / len(tensors)).to(half).double() for x in tensors)


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_the_answer_is_the_sum_of_the_workers_rounded_shares(name, workers):
    half, inputs = HALF[name], inputs_of(workers)
    out = tw.Simulation(name, workers).reduce(inputs)[0]
    for key in SHAPES:
        shares = [x[key] for x in inputs]
        one_rounding = torch.finfo(half).eps * torch.stack(shares).abs().sum(0)
        assert ((out[key] - mean_of_rounded(shares, half)).abs() <= one_rounding).all()
        assert torch.equal(out[key].to(half).double(), out[key])


@pytest.mark.parametrize("name", HALF)
def test_two_workers_answer_is_exactly_the_rounded_mean_of_rounded_values(name):
    half, inputs = HALF[name], inputs_of(2)
    out = tw.Simulation(name, 2).reduce(inputs)[0]
    for key in SHAPES:
        assert torch.equal(out[key], mean_of_rounded([x[key] for x in inputs], half).to(half).double())


@pytest.mark.parametrize("name", HALF)
def test_one_worker_gets_its_gradient_back_rounded(name):
    inputs = inputs_of(1)
    out = tw.Simulation(name, 1).reduce(inputs)[0]
    for key, x in inputs[0].items():
        assert torch.equal(out[key], x.to(HALF[name]).double())
        assert not torch.equal(out[key], x)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_sum_that_would_overflow_fp16_stays_finite_as_its_mean_does(workers):
    large = [{"w": torch.tensor([60000.0, -60000.0, 65000.0])} for _ in range(workers)]
    assert workers * 60000 > torch.finfo(torch.float16).max
    out = tw.Simulation("fp16", workers).reduce(large)[0]["w"]
    torch.testing.assert_close(out, large[0]["w"], rtol=2 * torch.finfo(torch.float16).eps, atol=0)


def test_a_value_beyond_the_type_overflows_in_fp16_and_not_in_bf16():
    beyond = [{"w": torch.tensor([1e6, 1.0])}, {"w": torch.tensor([0.0, 1.0])}]
    assert tw.Simulation("fp16", 2).reduce(beyond)[0]["w"].tolist() == [float("inf"), 1.0]
    torch.testing.assert_close(
        tw.Simulation("bf16", 2).reduce(beyond)[0]["w"], torch.tensor([5e5, 1.0]), rtol=2**-8, atol=0
    )


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_answer_has_the_inputs_type_and_is_equal_on_all_workers(name, dtype):
    outs = tw.Simulation(name, 3).reduce([{n: x.to(dtype) for n, x in t.items()} for t in inputs_of(3)])
    for key in SHAPES:
        assert outs[0][key].dtype == dtype
        assert all(torch.equal(outs[0][key], out[key]) for out in outs)


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("workers", [2, 5])
def test_one_all_reduce_of_half_the_bytes(name, workers):
    ((op, sent),) = tw.price(name, SHAPES, workers)
    ((_, dense),) = tw.price("dense", SHAPES, workers)
    assert op == "all_reduce"
    assert sent == dense // 2 == int(2 * (40 * 7 + 5 + 1) * 2 * (workers - 1) / workers)


@pytest.mark.parametrize("name", HALF)
def test_nothing_is_kept_and_nothing_is_owed(name):
    sim = tw.Simulation(name, 2)
    sim.reduce(inputs_of(2))
    assert all(state == () for states in sim.states for state in states.values())
    assert not any(x.any() for x in sim.owed().values())
