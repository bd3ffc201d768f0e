"""The low-rank kernels against their reference: to rounding, since a matrix product promises no order of sums."""

from __future__ import annotations

from math import inf, nan
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import reference
from thinwire.kernels.cpu import lowrank

relaxed = settings(deadline=None, max_examples=60)  # the first call compiles
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
RATIOS = st.sampled_from([1.0, 0.5, 0.0, 3.0])


@st.composite
def matrices(draw: st.DrawFn, specials: tuple[float, ...] = ()) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, which may be narrow, the error, P and Q: ragged sizes on both sides of where rows share a factor."""
    dtype = draw(st.sampled_from(DTYPES))
    wide = torch.promote_types(dtype, torch.float32)
    n, r = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    m = draw(st.integers(1, 40) | st.sampled_from([1535, 1537, 3001]))
    numbers = st.sampled_from((0.0, -0.0, 1e-40, 6e-8, -3e-6, 1.0, -2.5, 1000.0, *specials))
    scattered = arrays(np.float64, (n, m), elements=numbers, fill=st.nothing() if n * m < 60 else st.just(0.25))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.from_numpy(draw(scattered)).to(dtype)
    error, P, Q = (torch.randn(*shape, generator=g, dtype=wide) for shape in ((n, m), (n, r), (m, r)))
    return x, error, P, Q


def close(found: Tensor, expected: Tensor, magnitude: Tensor) -> None:
    """Equal up to the rounding of terms as large as ``magnitude``; NaN and Inf where the other has one."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    bad = ~expected.isfinite()
    assert torch.equal(~found.isfinite(), bad)
    bound = 64 * torch.finfo(found.dtype).eps * magnitude
    assert ((found - expected).abs() <= bound)[~bad].all()


@relaxed
@given(matrices(), RATIOS)
def test_the_products_are_the_references(case, ratio):
    x, error, P, Q = case
    size = x.abs().to(error.dtype) + ratio * error.abs()
    close(lowrank.product(x, error, ratio, Q), reference.product(x, error, ratio, Q), size @ Q.abs())
    transposed = reference.transposed_product(x, error, ratio, P)
    close(lowrank.transposed_product(x, error, ratio, P), transposed, size.mT @ P.abs())


@relaxed
@given(matrices(), RATIOS)
def test_what_is_left_and_what_is_written_are_the_references(case, ratio):
    x, error, P, Q = case
    sent = P.abs() @ Q.abs().mT
    size = x.abs().to(error.dtype) + ratio * error.abs() + sent
    left, expected = error.clone(), error.clone()
    lowrank.subtract_product(x, left, ratio, P, Q)
    reference.subtract_product(x, expected, ratio, P, Q)
    close(left, expected, size)
    lowrank.write_product(P, Q, left)
    reference.write_product(P, Q, expected)
    close(left, expected, sent)


@relaxed
@given(matrices(), RATIOS)
def test_what_is_settled_in_one_pass_is_the_references(case, ratio):
    x, error, P, Q = case
    M, N = P.flip(0) * 2, Q.flip(0) - 1
    x = x.to(error.dtype)
    sent, mean = P.abs() @ Q.abs().mT, M.abs() @ N.abs().mT
    size = x.abs() + ratio * error.abs() + sent
    for factors in [(P, Q, M, N), (P, Q, M, Q), (P, Q, P, N)]:
        found, expected = ((x.clone(), error.clone()) for _ in range(2))
        lowrank.settle_product(*found, ratio, *factors)
        reference.settle_product(*expected, ratio, *factors)
        close(found[1], expected[1], size)
        close(found[0], expected[0], mean + sent)


@relaxed
@given(matrices((inf, -inf, nan)), RATIOS)
def test_a_bad_number_is_seen_in_every_column_of_its_row_and_nowhere_else(case, ratio):
    x, error, P, Q = case
    Q = Q.clone()
    Q[0] = 0  # times Inf it is NaN
    M = torch.add(x, error, alpha=ratio)
    bad_rows, bad_columns = ~M.isfinite().all(1), ~M.isfinite().all(0)
    for module in (lowrank, reference):
        P_local, Q_local = module.product(x, error, ratio, Q), module.transposed_product(x, error, ratio, P)
        assert torch.equal(~P_local.isfinite().all(1), bad_rows)
        assert torch.equal(~P_local.isfinite().any(1), bad_rows)
        assert torch.equal(~Q_local.isfinite().any(1), bad_columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read_as_what_it_is(dtype):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(-1, 1)
    found = lowrank.product(x, torch.zeros(len(x), 1), 1.0, torch.ones(1, 1))
    assert torch.equal(found.nan_to_num(nan=0.25), x.float().nan_to_num(nan=0.25))


@pytest.mark.parametrize("place", [(0, 0), (3, 2), (6, 4)])
def test_strided_matrices_are_read_by_their_meaning(place):
    g = torch.Generator().manual_seed(0)
    x, error = (torch.randn(5, 7, generator=g).mT for _ in range(2))
    Q, P = torch.randn(5, 2, generator=g), torch.randn(7, 2, generator=g)
    x[place] += 10
    torch.testing.assert_close(kernels.product([(x, error, 1.0, Q)])[0], (x + error) @ Q)
    torch.testing.assert_close(kernels.transposed_product([(x, error, 1.0, P)])[0], (x + error).mT @ P)


def test_many_columns_go_to_the_library():
    few, many = torch.ones(1, kernels.MOST_COLUMNS), torch.ones(1, kernels.MOST_COLUMNS + 1)
    with mock.patch.object(lowrank, "product_each", side_effect=lowrank.product_each) as fast:
        sizes = [4, kernels.MOST_COLUMNS + 1, kernels.MOST_COLUMNS]
        batch = [(torch.ones(2, 3), torch.ones(2, 3), 1.0, torch.full((3, r), float(r))) for r in sizes]
        found = kernels.product(batch)
    assert [len(args[0]) for args, _ in fast.call_args_list] == [2]
    assert [P.tolist() for P in found] == [[[6.0 * r] * r] * 2 for r in sizes]
    assert kernels._narrow_on_cpu(few)
    assert not kernels._narrow_on_cpu(many)
    assert not kernels._narrow_on_cpu(torch.ones(1, 1, device="meta"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_matrices_have_the_bits_that_they_have_alone(dtype):
    wide, g = torch.promote_types(dtype, torch.float32), torch.Generator().manual_seed(0)
    shapes = [(3, 5, 2), (64, 33, 4), (9, 1537, 4), (1, 1, 1), (40, 2000, 5)]
    cases = []
    for n, m, r in shapes:
        x, error, P, Q = (torch.randn(*s, generator=g, dtype=wide) for s in [(n, m), (n, m), (n, r), (m, r)])
        cases.append((x.to(dtype), error, P, Q))
    products = kernels.product([(x, e, 0.5, Q) for x, e, _, Q in cases])
    transposed = kernels.transposed_product([(x, e, 0.5, P) for x, e, P, _ in cases])
    left, written = [e.clone() for _, e, _, _ in cases], [torch.empty_like(e) for _, e, _, _ in cases]
    kernels.subtract_product([(x, e, 0.5, P, Q) for (x, _, P, Q), e in zip(cases, left, strict=True)])
    kernels.write_product([(P, Q, out) for (_, _, P, Q), out in zip(cases, written, strict=True)])
    for i, (x, error, P, Q) in enumerate(cases):
        assert torch.equal(products[i], lowrank.product(x, error, 0.5, Q))
        assert torch.equal(transposed[i], lowrank.transposed_product(x, error, 0.5, P))
        alone = error.clone()
        lowrank.subtract_product(x, alone, 0.5, P, Q)
        assert torch.equal(left[i], alone)
        kernels.write_product([(P, Q, alone)])
        assert torch.equal(written[i], alone)
    if dtype != wide:
        return
    settled = [(x.clone(), e.clone()) for x, e, _, _ in cases]
    kernels.settle_product([(*s, 0.5, P, Q, P, Q * 2) for s, (_, _, P, Q) in zip(settled, cases, strict=True)])
    for found, (x, error, P, Q) in zip(settled, cases, strict=True):
        alone = x.clone(), error.clone()
        lowrank.settle_product(*alone, 0.5, P, Q, P, Q * 2)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (7, 7), (64, 4), (577, 4), (300, 16)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_orthonormal_columns_are_the_references(shape, dtype, scale):
    P = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype) * scale
    found, eps = lowrank.orthogonalize(P), torch.finfo(dtype).eps
    torch.testing.assert_close(found, reference.orthogonalize(P), rtol=0, atol=2000 * eps)
    torch.testing.assert_close(found.mT @ found, torch.eye(shape[1], dtype=dtype), rtol=0, atol=20 * eps)
    assert torch.equal(lowrank.orthogonalize(P.mT.contiguous().mT), found)


@relaxed
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 6), st.integers(0, 99), st.booleans())
def test_columns_that_depend_on_others_give_way_to_orthonormal_ones(n, r, independent, seed, tiny):
    r = min(n, r)
    g = torch.Generator().manual_seed(seed)
    P = torch.randn(n, independent, generator=g) @ torch.randn(independent, r, generator=g)
    P = P * 1e-38 if tiny else P
    for module in (lowrank, reference):
        found = module.orthogonalize(P)
        torch.testing.assert_close(found.mT @ found, torch.eye(r), rtol=0, atol=1e-5)
    if not tiny:
        spanned = lowrank.orthogonalize(P)
        torch.testing.assert_close(spanned @ (spanned.mT @ P), P, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [inf, -inf, nan])
@pytest.mark.parametrize("module", [lowrank, reference])
def test_no_orthonormal_columns_come_of_a_bad_number(bad, module):
    P = torch.randn(6, 3)
    P[4, 1] = bad
    assert not module.orthogonalize(P).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_is_bounded_where_the_reference_says_so(dtype):
    """By batches of all that can happen: some are not, and those say nothing of the others."""
    g = torch.Generator().manual_seed(0)
    most = torch.finfo(dtype).max
    batch, expected = [], []
    for value, good in [(1.0, True), (0.0, True), (most**0.5, True), (most, False), (inf, False), (nan, False)]:
        for first in (True, False):
            P, Q = torch.randn(7, 3, generator=g, dtype=dtype), torch.randn(5, 3, generator=g, dtype=dtype)
            (P if first else Q)[2, 1] = value
            batch.append((P, Q.mT.contiguous().mT))
            expected.append(good)
    assert lowrank.bounded_each(batch) == kernels.bounded(batch) == expected
    assert [reference.bounded(P, Q) for P, Q in batch] == expected
