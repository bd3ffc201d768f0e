"""What kernels read in passing: sums with an error, and gradients of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

import thinwire as tw
from thinwire import kernels
from thinwire.core.combine import error_feedback
from thinwire.core.rehearsal import rehearse
from thinwire.core.value import Sum
from thinwire.kernels import cpu, reference
from thinwire.kernels.cpu.select import SAMPLE

relaxed = settings(deadline=None)
NARROW = [torch.bfloat16, torch.float16]
KINDS = [torch.float32, torch.float64, *NARROW]

Encode = Callable[[kernels.Kernels, Tensor | Sum], tuple[Tensor, Tensor]]
ENCODERS: dict[str, Encode] = {
    "signs": lambda kernel, x: kernel.encode_signs(x, 3, -(-x.numel() // 3), 512, 1.5),
    "levels": lambda kernel, x: kernel.encode_levels(x, 3, -(-x.numel() // 3), 512, 4, inf, 123456789012345),
    "top_k": lambda kernel, x: kernel.top_k(x, -(-x.numel() // 100)),
}
encoders = pytest.mark.parametrize("name", ENCODERS)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.signbit() | a.isnan(), b.signbit() | b.isnan())


def assert_same(mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], name: str) -> None:
    # a mean of magnitudes depends on the order of its sum by an ulp
    ulps = torch.finfo(mine[0].dtype).eps * (0 if name != "signs" else 1 if mine[0].dtype == torch.float32 else 512)
    torch.testing.assert_close(mine[0], theirs[0], rtol=ulps, atol=0, equal_nan=True)
    assert torch.equal(mine[1], theirs[1])


def pair(d: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.randn(d, generator=g).pow(3).to(dtype)
    if d > 8:
        x[:8] = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 6e-8, 65504.0, -1.0, 1.0]).to(dtype)
    return x, torch.randn(d, generator=g, dtype=wide)


@encoders
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("d", [1, 31, 32, 257, 4_099, 4 * SAMPLE + 4_321])
def test_a_sum_in_passing_is_the_sum_made_first(name: str, dtype: torch.dtype, d: int) -> None:
    for ratio in (1.0, 0.5, 0.0):  # products that are exact, so that nothing depends on how often they are rounded
        x, error = pair(d, dtype)
        owed = error.clone()
        p = x.to(error.dtype) + ratio * error
        passing, made = Sum(x.clone(), error, ratio), Sum(x.clone(), error, ratio)
        mine, theirs = ENCODERS[name](cpu, passing), ENCODERS[name](reference, made)
        assert passing.pending == made.pending == (name == "signs")
        for one in (passing, made):
            same(*(one.x, x) if one.pending else (one.out, p))
        assert torch.equal(error, owed)
        assert_same(mine, theirs, name)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_any_ratio_is_rounded_as_torch_does_or_once_more(dtype: torch.dtype) -> None:
    x, error = pair(5_000, dtype)
    passing, made = Sum(x.clone(), error, 1 / 3), Sum(x.clone(), error, 1 / 3)
    cpu.top_k(passing, 50)
    made.made()
    assert ((passing.out - made.out).abs() <= torch.finfo(error.dtype).eps * error.abs()).all()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("d", [1, 31, 257, 4_099, 20_001])
def test_signs_are_taken_off_a_sum_that_is_not_made(dtype: torch.dtype, d: int) -> None:
    columns = -(-d // 3)
    for ratio in (1.0, 0.5):
        x, error = pair(d, dtype)
        scale, bits = cpu.encode_signs(Sum(x, error, ratio), 3, columns, 4096, 1.5)
        expected = torch.empty_like(error)
        reference.add_signs(scale, bits, columns, 4096, x.to(error.dtype) + ratio * error, -1.0, expected, False)
        for kernel in (cpu, reference):
            p = Sum(x.clone(), error.clone(), ratio)
            kernel.add_signs(scale, bits, columns, 4096, p, -1.0, p.error, False)
            same(p.error, expected)
            same(p.x, x)
            assert p.pending


@encoders
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("d", [1, 31, 4_099])
def test_16_bits_are_read_as_if_widened_first(name: str, dtype: torch.dtype, d: int) -> None:
    x, _ = pair(d, dtype)
    assert_same(ENCODERS[name](kernels._reading(x), x), ENCODERS[name](cpu, x.float()), name)
    assert_same(ENCODERS[name](reference, x), ENCODERS[name](reference, x.float()), name)
    assert kernels._reading(x) is cpu


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_all_numbers_of_16_bits(dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    for size in (len(x), len(x) - 1):  # in vectors, and one by one at the end
        p = Sum(x[-size:].clone(), torch.zeros(size), 1.0)
        cpu.top_k(p, 100)
        same(p.out, x[-size:].float() + 0.0)


@relaxed
@given(arrays(np.float32, st.integers(1, 300), elements=st.sampled_from([0.0, -0.0, 1e-40, 1.0, -2.0, inf, -inf, nan])))
def test_a_bad_number_of_a_sum_shows(values: np.ndarray) -> None:
    x, d = torch.from_numpy(values), len(values)
    good = bool(x.isfinite().all())
    for kernel in (cpu, reference):
        scale, _ = kernel.encode_signs(Sum(x.clone(), torch.ones(d), 1.0), 1, d, 8, 1.5)
        found, _ = kernel.top_k(Sum(x.clone(), torch.ones(d), 1.0), 1)
        largest, _ = kernel.encode_levels(Sum(x.clone(), torch.ones(d), 1.0), 1, d, 8, 4, inf, 1)
        assert [bool(t.isfinite().all()) for t in (scale, found, largest)] == [good] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("what", ["few values", "zeros", "all alike", "a loud end", "NaN"])
def test_top_k_where_a_sample_misleads(dtype: torch.dtype, what: str) -> None:
    d = 4 * SAMPLE + 999
    x = torch.randn(d, dtype=dtype, generator=torch.Generator().manual_seed(0))
    if what == "few values":
        x = x.round()
    if what == "zeros":
        x[: d - 50] = 0
    if what == "all alike":
        x[:] = -1.5
    if what == "a loud end":
        x[-d // 90 :] *= 1e6
    if what == "NaN":
        x[::3] = nan
    for k in (1, 50, 51, d // 100, d // 9, d // 4, d):
        values, places = cpu.top_k(Sum(x.clone(), torch.zeros_like(x), 1.0), k)
        expected, where = reference.top_k(x + 0.0, k)
        assert torch.equal(places, where)
        same(values, expected)


@pytest.mark.parametrize("name", ["signs", "levels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_stacked_rows_are_added_in_their_order(name: str, dtype: torch.dtype) -> None:
    d, rows = 5_003, 4
    base, *xs = (torch.randn(d, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i in range(rows + 1))
    args = (d, 512) if name == "signs" else (d, 512, 4)
    rest = (inf, 7) if name == "levels" else (1.5,)
    encoded = [getattr(cpu, f"encode_{name}")(x, 1, *args, *rest) for x in xs]
    stack = [torch.cat(tensors) for tensors in zip(*encoded, strict=True)]
    outs = [torch.empty_like(base), torch.empty_like(base)]
    for kernel, out in zip((cpu, reference), outs, strict=True):
        getattr(kernel, f"add_{name}")(*stack, *args, base, 1 / 3, out, True)
    one_by_one = base.clone()
    for payload in encoded:
        getattr(reference, f"add_{name}")(*payload, *args, one_by_one, 1 / 3, one_by_one, False)
    same(outs[0], one_by_one)
    same(outs[1], one_by_one)


@pytest.mark.parametrize("columns", [5_000_000, 2_500_003])
def test_what_goes_past_the_caches_arrives(columns: int) -> None:
    x = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    rows = -(-len(x) // columns)
    scale, bits = cpu.encode_signs(x, rows, columns, 2048, 1.5)
    outs = [torch.empty_like(x), torch.empty_like(x)]
    for kernel, out in zip((cpu, reference), outs, strict=True):
        kernel.add_signs(scale, bits, columns, 2048, x, -1.0, out, False)
    same(*outs)


def test_large_sketches_equal_reference() -> None:
    columns = 256 * reference.RUN + 5
    x = torch.randint(-1000, 1000, (100_003,), generator=torch.Generator().manual_seed(0)).float()
    for rows in (1, 3, 5):
        sketch = cpu.count_sketch(x, rows, columns, 99)
        assert torch.equal(sketch, reference.count_sketch(x, rows, columns, 99))
        assert torch.equal(cpu.estimate(sketch, len(x), 99), reference.estimate(sketch, len(x), 99))


def test_runs_of_a_large_sketch_spread_evenly_and_rows_are_independent() -> None:
    columns = 256 * reference.RUN
    d = 400 * columns
    ones, places, signs = torch.ones(d), [], []
    for salt in reference.row_keys(5, 1234567890123456):
        place, sign = reference._hashed(d, columns, salt, ones)
        count = place.bincount(minlength=columns).double()
        assert 0.4 < count.var() / count.mean() < 1.8
        runs = place.view(-1, reference.RUN)
        assert ((runs.diff(dim=1) % columns) == 1).all()
        places.append(runs[:, 0].float())
        signs.append(sign)
    assert (torch.corrcoef(torch.stack(places)) - torch.eye(5)).abs().max() < 0.02
    together = torch.stack(signs).view(5, -1, reference.RUN).transpose(1, 2).flatten(0, 1)
    assert (torch.corrcoef(together) - torch.eye(len(together))).abs().max() < 0.02
    assert together.mean(1).abs().max() < 0.02


def test_a_large_sketchs_guess_is_unbiased_with_the_variance_of_the_other_runs() -> None:
    d, columns, trials, run = 2_048, 256 * reference.RUN, 3_000, reference.RUN
    x = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    guesses = torch.stack(
        [kernels.estimate(kernels.count_sketch(x, 1, columns, key * 7919), d, key * 7919) for key in range(trials)]
    )
    squares = x.square()
    variance = (squares.sum() - squares.view(-1, run).sum(1)).repeat_interleave(run) / columns
    assert ((guesses.mean(0) - x).abs() < 5 * (variance / trials).sqrt()).all()
    assert abs(guesses.var(0).sum() / variance.sum() - 1) < 0.1


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "spec", ["dist-ef", "dist-ef-block", "ef-sign", "topk:ratio=0.1", "gtopk:ratio=0.1", "qsgd", "dq"]
)
def test_a_method_reads_16_bits_as_it_reads_the_same_numbers_in_32(spec: str, dtype: torch.dtype) -> None:
    narrow, wide = tw.Simulation(spec, 2), tw.Simulation(spec, 2)
    assert narrow.method.widens
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        inputs = [{"w": torch.randn(40, 30, generator=g).to(dtype)} for _ in range(2)]
        mine = narrow.reduce(inputs)[0]["w"]
        theirs = wide.reduce([{"w": x["w"].float()} for x in inputs])[0]["w"]
        assert torch.equal(mine, theirs.to(dtype))
    assert all(torch.equal(narrow.owed()[n], wide.owed()[n]) for n in wide.owed())


@pytest.mark.parametrize("spec", ["dist-ef-block:after=5", "topk:min_size=1000000", "qsgd", "sketch", "dgc", "acp"])
def test_a_rehearsal_compiles_all_that_a_step_needs(spec: str) -> None:
    method = tw.method(spec)
    rehearse(method, [torch.float32, torch.bfloat16], torch.device("cpu"))
    before = compiled_versions()
    for dtype in (torch.float32, torch.bfloat16):
        sim = tw.Simulation(method.bare(), 2)
        for step in range(2):
            sim.reduce([{"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).to(dtype)}] * 2)
    assert compiled_versions() == before


def compiled_versions() -> int:
    from thinwire.kernels.cpu import bits, levels, select, signs, sketch

    modules = (bits, levels, select, signs, sketch)
    return sum(len(f.signatures) for m in modules for f in vars(m).values() if hasattr(f, "signatures"))


def test_a_rehearsal_forgives() -> None:
    class Broken(tw.Method):
        def reduce(self, x, state, ctx):  # type: ignore[no-untyped-def]
            raise ArithmeticError

    rehearse(error_feedback(Broken()), [torch.float32], torch.device("cpu"))
