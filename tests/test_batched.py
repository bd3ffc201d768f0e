"""Requests that a lock-step answers itself: no communication, and the same bits in any company."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import thinwire as tw
from thinwire.core.exchange import exchange
from thinwire.core.identity import Identity, Raw
from thinwire.core.lockstep import Lockstep, drive
from thinwire.core.method import Context, Method, Reduced
from thinwire.core.requests import AllGather, AllReduce, AllToAll, Batched
from thinwire.core.value import Sum, Written, made
from thinwire.methods.lowrank import orthogonalize

torch.set_num_threads(1)


def asks(*tensors, function=orthogonalize):
    """A generator that has each of its tensors computed, one after another."""
    found = []
    for tensor in tensors:
        found.append((yield Batched(function, tensor)))
    return found


def test_what_comes_to_one_function_is_computed_in_one_call():
    calls = []

    def doubled(batch):
        calls.append(len(batch))
        return [x * 2 for x in batch]

    def tripled(batch):
        calls.append(-len(batch))
        return [x * 3 for x in batch]

    inputs = [torch.ones(3, 2), torch.ones(2, 2), torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.float64)]
    asked = [asks(x, x + 1, function=f) for x, f in zip(inputs, [doubled, tripled, doubled, doubled], strict=True)]
    lockstep = Lockstep(asked)
    assert lockstep.advance() == []
    assert calls == [3, -1, 3, -1]
    for x, times, found in zip(inputs, [2, 3, 2, 2], lockstep.results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, [x * times, (x + 1) * times], strict=True))
        assert found[0].dtype == x.dtype


def reduces(x):
    return (yield AllReduce(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[5], [3, 7, 1], [40_000, 3, 20_000]], ids=["one", "small", "large"])
def test_sums_are_packed_as_each_number_s_share(sizes, dtype):
    """Many small tensors, few large ones, and memory that is reduced in place: alike, to the bit."""
    xs = [torch.randn(size).to(dtype) for size in sizes]
    want = torch.cat(xs) * (1 / 3)
    (apart,) = Lockstep([reduces(x) for x in xs], share=1 / 3).advance()
    assert torch.equal(apart.buffer, want)
    memory = torch.cat(xs)
    lockstep = Lockstep([reduces(x) for x in memory.split(sizes)], share=1 / 3)
    lockstep.scratch = memory
    (in_place,) = lockstep.advance()
    assert torch.equal(in_place.buffer, want)
    assert in_place.buffer.data_ptr() == memory.data_ptr()
    (whole,) = Lockstep([reduces(x) for x in xs]).advance()
    assert torch.equal(whole.buffer, torch.cat(xs))


def test_computing_makes_no_round_and_keeps_the_order_of_the_tensors():
    def late(x):
        return (yield AllReduce((yield Batched(orthogonalize, x))))

    def early(x):
        return (yield AllReduce(x))

    first, second = torch.randn(4, 2), torch.randn(3)
    lockstep = Lockstep([late(first), early(second)])
    ((sent,),) = drive(lockstep, lambda c: c.buffer)
    assert torch.equal(sent.buffer, torch.cat([orthogonalize([first])[0].flatten(), second]))
    assert torch.equal(lockstep.results[1], second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (7, 7), (64, 4), (577, 4), (300, 32)])
def test_a_factor_has_the_same_bits_alone_and_in_a_batch(shape, dtype):
    g = torch.Generator().manual_seed(0)
    factors = [torch.randn(*shape, generator=g, dtype=dtype) for _ in range(5)] + [torch.zeros(*shape, dtype=dtype)]
    together = Lockstep([asks(P) for P in factors])
    together.advance()
    for P, (found,) in zip(factors, together.results, strict=True):
        alone = Lockstep([asks(P)])
        alone.advance()
        assert torch.equal(alone.results[0][0], found)
        assert torch.equal(orthogonalize([P])[0], found)
        eye = torch.eye(shape[1], dtype=dtype)
        torch.testing.assert_close(found.mT @ found, eye, rtol=0, atol=100 * torch.finfo(dtype).eps)


class Twice(Method):
    def reduce(self, x, state, ctx):
        doubled = yield Batched(lambda batch: [one * 2 for one in batch], x)
        mean = yield AllReduce(doubled)
        return Reduced(mean, doubled), state


@pytest.mark.parametrize("present", [0.0, 1.0])
def test_whether_a_parameter_is_absent_rides_with_the_first_message(present):
    x = torch.randn(5)
    lockstep = Lockstep([exchange(Twice(), x.clone(), (), Context(), torch.tensor([present]))])
    ((sent,),) = drive(lockstep, lambda c: c.buffer)
    assert torch.equal(sent.buffer, torch.cat([x * 2, torch.tensor([present])]))
    assert torch.equal(lockstep.results[0][0], x * 2 * present)


@pytest.mark.parametrize("spec", ["acp:rank=2", "powersgd:rank=2"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [(0, 0), (4, 7), (8, 15)])
def test_one_bad_number_anywhere_drops_the_step_and_only_it(spec, bad, place):
    def run(poisoned):
        sim = tw.Simulation(spec, 2)
        means = []
        for step in range(4):
            g = torch.Generator().manual_seed(step)
            inputs = [{"w": torch.randn(9, 16, generator=g)} for _ in range(2)]
            if step == 2:
                if not poisoned:
                    sim.step += 1
                    continue
                inputs[1]["w"][place] = bad
            means.append(sim.reduce(inputs)[0]["w"])
        return sim, means

    (sim, means), (clean, expected) = run(poisoned=True), run(poisoned=False)
    assert not means.pop(2).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(means, expected, strict=True))
    for rank in range(2):
        assert torch.equal(sim.states[rank]["w"].error, clean.states[rank]["w"].error)


@pytest.mark.parametrize("x", [torch.randn(3, 4), torch.randn(4, 3).mT, torch.randn(3, 4).bfloat16()])
def test_a_flattened_sum_is_the_same_sum(x):
    error = torch.randn(3, 4)
    expected = x + 0.5 * error
    for first in (lambda p: p.made(), lambda p: p.flatten().made(), lambda p: p.flatten(1).flatten().made()):
        whole = Sum(x.clone(), error, 0.5)
        part = whole.flatten()
        first(whole)
        assert not whole.pending
        assert not part.pending
        assert torch.equal(whole.made(), expected)
        assert torch.equal(part.made(), expected.flatten())
        assert part.out.data_ptr() == whole.out.data_ptr()


@pytest.mark.parametrize("workers", [2, 3, 8, 33])
def test_vectors_in_16_bits_have_the_same_bits_alone_and_in_a_batch(workers):
    C, g = Identity(torch.bfloat16), torch.Generator().manual_seed(0)
    sizes = (1, 2, 5, 16, 31, 257)
    sums = [Sum(torch.randn(d, generator=g), torch.randn(d, generator=g), 0.5) for d in sizes]
    given = [(p, workers, -(-p.numel() // workers)) for p in sums]
    for payload, args in zip(C.encode(given), given, strict=True):
        assert torch.equal(payload.values, C.encode([args])[0].values)
        assert torch.equal(payload.values.flatten()[: args[0].numel()], args[0].value().bfloat16())
    stacks = [Raw(torch.randn(workers, d, generator=g).bfloat16()) for d in sizes]
    bases = [torch.randn(d, generator=g) for d in sizes]
    outs, alone = ([torch.empty(d) for d in sizes] for _ in range(2))
    parts = list(zip(stacks, sizes, bases, strict=True))
    C.add([(raw, d, base, 1 / workers, out, True) for (raw, d, base), out in zip(parts, outs, strict=True)])
    for (raw, d, base), out, expected in zip(parts, outs, alone, strict=True):
        C.add([(raw, d, base, 1 / workers, expected, True)])
        assert torch.equal(out, expected)
        torch.testing.assert_close(out, base + raw.values.float().mean(0))


@pytest.mark.parametrize("spec", ["acp:rank=2", "acp:rank=6,min_saving=0", "powersgd:rank=2", "dist-ef-block:block=64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_error_and_mean_in_one_pass_are_those_of_two_which_keep_the_gradient(spec, dtype):
    method, wide = tw.method(spec), torch.promote_types(dtype, torch.float32)
    states = [method.init(torch.zeros(24, 40, dtype=wide), Context(name="w")) for _ in range(2)]
    for step in range(3):
        x = torch.randn(24, 40, generator=torch.Generator().manual_seed(step)).to(dtype)
        means = []
        for i, keep in enumerate((False, True)):
            given = x.clone()
            lockstep = Lockstep([exchange(method, given, states[i], Context(step, "w", keep=keep))])
            drive(lockstep, lambda c: c.buffer[None] if c.op == "all_gather" else c.buffer)
            mean, states[i] = lockstep.results[0]
            assert isinstance(mean, Written) == (not keep and dtype == wide)
            assert torch.equal(given, x) == (keep or dtype != wide)
            means.append(made(mean, given))
        torch.testing.assert_close(*means)
        torch.testing.assert_close(*(state.error for state in states))


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Shapes(Method):
    """Payloads of every number of dimensions come back in their shapes, with what the others sent."""

    def reduce(self, x, state, ctx):
        W, rank = ctx.world, ctx.rank
        cubes = torch.arange(W * 6).view(W, 2, 3).to(torch.uint8) + rank
        exchanged = yield AllToAll(Pair(torch.arange(W) + 10.0 * rank, cubes))
        assert exchanged.a.tolist() == [rank + 10 * i for i in range(W)]
        assert exchanged.b.tolist() == [(cubes[rank] - rank + i).tolist() for i in range(W)]
        gathered = yield AllGather(Pair(torch.tensor(1.5 + rank), torch.full((2, 3), rank, dtype=torch.int16)))
        assert gathered.a.tolist() == [1.5 + i for i in range(W)]
        assert gathered.b.tolist() == [[[i] * 3] * 2 for i in range(W)]
        return Reduced(x, x), state


def test_payloads_keep_their_shapes():
    out = tw.Simulation(Shapes(), 3).reduce([{"w": torch.ones(4), "v": torch.ones(2)}] * 3)
    assert len(out) == 3
