"""Small tensors that travel as one come out as if each had travelled alone."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import thinwire as tw
from thinwire.core.bundle import Given, start
from thinwire.core.combine import SMALL, Where, after, clipped
from thinwire.core.method import Context
from thinwire.core.momentum import running_mean
from thinwire.registry import resolve
from thinwire.runtime.state import flatten

SHAPES = {
    "w": (12, 20),
    "narrow": (2, 3),
    "none": (),
    "one": (1,),
    "two": (2,),
    "three": (3,),
    "ten": (10,),
    "bias": (64,),
    "long": (SMALL + 1,),
}
JOIN = ["narrow", "two", "three", "ten", "bias"]
METHODS = {
    "acp": lambda: resolve("acp:rank=2"),
    "powersgd": lambda: resolve("powersgd:rank=2"),
    "two-way": lambda: resolve("dist-ef-block:block=16"),
    "two-way, momentum": lambda: resolve("dist-ef-block:block=16,momentum=0.9"),
    "two-way, running mean": lambda: running_mean(0.9, resolve("dist-ef-block:block=16")),
    "two-way, after a warm-up": lambda: after(2, resolve("dist-ef-block:block=16")),
}


def run(method, workers, together, dtype=torch.float32, bad=None, rates=(0.1, 0.1, 0.05, 0.05, 0.0, 0.1)):
    sim, means = tw.Simulation(method, workers), []
    with nullcontext() if together else mock.patch.object(Where, "joins", return_value=False):
        for step, lr in enumerate(rates):
            g = torch.Generator().manual_seed(step)
            inputs = [{n: torch.randn(s, generator=g).to(dtype) for n, s in SHAPES.items()} for _ in range(workers)]
            if bad is not None and step == 2:
                inputs[-1]["ten"][3] = bad
            means.append(sim.reduce(inputs, lr))
    return sim, means


def assert_same(one, other):
    (sim, means), (control, expected) = one, other
    for got, wanted in zip(means, expected, strict=True):
        for rank, tensors in enumerate(got):
            for name, mean in tensors.items():
                torch.testing.assert_close(mean, wanted[rank][name], rtol=0, atol=0, equal_nan=True)
    for states, others in zip(sim.states, control.states, strict=True):
        for name, state in states.items():
            for a, b in zip(flatten(state).values(), flatten(others[name]).values(), strict=True):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), name
    assert sim._last_lr == control._last_lr
    assert sim.bytes_sent == control.bytes_sent


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", METHODS)
def test_together_as_alone(name, workers):
    method = METHODS[name]()
    assert_same(run(method, workers, together=True), run(method, workers, together=False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["acp", "two-way, momentum"])
def test_together_as_alone_in_other_types(name, dtype):
    method = METHODS[name]()
    assert_same(run(method, 3, together=True, dtype=dtype), run(method, 3, together=False, dtype=dtype))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", METHODS)
def test_a_bad_number_voids_its_own_tensor_and_no_other(name, bad):
    method = METHODS[name]()
    found = run(method, 3, together=True, bad=bad)
    voided = {n for out in found[1][2] for n, mean in out.items() if not mean.isfinite().all()}
    assert voided == {"ten"}
    assert_same(found, run(method, 3, together=False, bad=bad))


@pytest.mark.parametrize("name", METHODS)
def test_those_that_join_are_one_exchange(name):
    method = METHODS[name]()

    def members(rates):
        parts = []
        for lr, (one, shape) in zip(rates, SHAPES.items(), strict=True):
            x, ctx = torch.ones(shape), Context(name=one, world=4, lr=lr)
            parts.append(Given(x, method.init(x, ctx), ctx))
        return [[list(SHAPES)[i] for i in some] for some in start(method, parts).members]

    assert sorted(some for some in members([0.1] * 9) if len(some) > 1) == [JOIN]
    # the errors of tensors whose rates differ differ in their units
    assert [some for some in members([0.1] * 7 + [0.2] * 2) if len(some) > 1] == [JOIN[:-1]]


def test_a_clipped_tensor_travels_alone():
    method = clipped(1.0, resolve("dist-ef-block"))  # the norm is of all its numbers
    assert not any(method.joins(torch.ones(shape), Context(world=4)) for shape in SHAPES.values())
