"""Each kernel equals the reference, bit for bit where the order of a sum cannot show."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from thinwire import kernels
from thinwire.core.value import Sum
from thinwire.kernels import cpu, reference

relaxed = settings(deadline=None)  # the first call compiles
dtypes = st.sampled_from([np.float32, np.float64])
blocks = st.sampled_from([8, 16, 24, 72, 1024])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """rows, columns, and how many numbers there are: the last rows may be short or empty."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    return rows, columns, draw(st.integers(0, rows * columns))


@st.composite
def vectors(draw: st.DrawFn, specials: tuple[float, ...] = (0.0, -0.0, inf, -inf, nan)) -> tuple[Tensor, int, int]:
    dtype, (rows, columns, d) = draw(dtypes), draw(layouts())
    most = float(np.finfo(dtype).max / 128)  # no row of finite numbers overflows
    finite = st.floats(-most, most, width=np.finfo(dtype).bits)
    x = draw(arrays(dtype, d, elements=finite | st.sampled_from(specials)))
    return torch.from_numpy(x), rows, columns


def assert_same_encoding(x: Tensor, rows: int, columns: int, block: int) -> None:
    scale, bits = cpu.encode_signs(x, rows, columns, block, 1.5)
    expected, expected_bits = reference.encode_signs(x, rows, columns, block, 1.5)
    assert bits.dtype == torch.uint8
    assert torch.equal(bits, expected_bits)
    # Summed in float64, a float32 scale is at most one ulp off; a float64 one has each addition's rounding.
    info = torch.finfo(x.dtype)
    ulps = 1 if x.dtype == torch.float32 else columns
    torch.testing.assert_close(
        scale, expected, rtol=ulps * info.eps, atol=info.smallest_normal * info.eps, equal_nan=True
    )


def assert_same_decoding(scale: Tensor, bits: Tensor, columns: int, block: int, base: Tensor) -> None:
    for alpha in (None, -1.0, 1 / 3):
        outs = []
        for kernel in (cpu, reference):
            out = torch.empty_like(base)
            if alpha is None:
                kernel.decode_signs(scale, bits, columns, block, out)
            else:
                kernel.add_signs(scale, bits, columns, block, base, alpha, out, False)
            outs.append(out)
        torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)
        real = ~outs[0].isnan()
        assert torch.equal(outs[0][real].signbit(), outs[1][real].signbit())


@relaxed
@given(vectors(), blocks)
def test_encode_equals_reference(case: tuple[Tensor, int, int], block: int) -> None:
    assert_same_encoding(*case, block)


@relaxed
@given(layouts(), dtypes, blocks, st.data())
def test_decode_equals_reference(layout: tuple[int, int, int], dtype: type, block: int, data: st.DataObject) -> None:
    """Of any scale, any bytes and any base."""
    rows, columns, d = layout
    numbers = st.floats(width=np.finfo(dtype).bits)
    scale = data.draw(arrays(dtype, (rows, -(-columns // block)), elements=numbers))
    bits = data.draw(arrays(np.uint8, (rows, -(-columns // 8))))
    base = data.draw(arrays(dtype, d, elements=numbers))
    assert_same_decoding(torch.from_numpy(scale), torch.from_numpy(bits), columns, block, torch.from_numpy(base))


ratios = st.sampled_from([1.0, 0.5, 0.0])  # whose products are exact


def drawn_signs(data: st.DataObject, dtype: type, rows: int, columns: int, block: int) -> tuple[Tensor, Tensor]:
    """Any scales and bytes."""
    numbers = st.floats(width=np.finfo(dtype).bits)
    scale = data.draw(arrays(dtype, (rows, -(-columns // block)), elements=numbers))
    return torch.from_numpy(scale), torch.from_numpy(data.draw(arrays(np.uint8, (rows, -(-columns // 8)))))


def drawn_numbers(data: st.DataObject, dtype: type, d: int) -> Tensor:
    return torch.from_numpy(data.draw(arrays(dtype, d, elements=st.floats(width=np.finfo(dtype).bits))))


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@relaxed
@given(layouts(), dtypes, blocks, ratios, st.data())
def test_a_workers_pass_is_the_references(
    layout: tuple[int, int, int], dtype: type, block: int, ratio: float, data: st.DataObject
) -> None:
    rows, columns, d = layout
    signs = *drawn_signs(data, dtype, rows, columns, block), *drawn_signs(data, dtype, rows, columns, block)
    x, error = drawn_numbers(data, dtype, d), drawn_numbers(data, dtype, d)
    found, expected = ((x.clone(), error.clone()) for _ in range(2))
    cpu.settle_signs(*signs, columns, block, *found, ratio)
    reference.settle_signs(*signs, columns, block, *expected, ratio)
    same(found[0], expected[0])
    same(found[1], expected[1])


@relaxed
@given(layouts(), dtypes, blocks, ratios, st.data())
def test_a_servers_passes_are_the_references(
    layout: tuple[int, int, int], dtype: type, block: int, ratio: float, data: st.DataObject
) -> None:
    rows, columns, _ = layout
    d = data.draw(st.integers(0, columns))
    most = float(np.finfo(dtype).max / 1024)  # no sum of finite numbers overflows
    finite = st.floats(-most, most, width=np.finfo(dtype).bits)
    scale = torch.from_numpy(data.draw(arrays(dtype, (rows, -(-columns // block)), elements=finite)))
    _, bits = drawn_signs(data, dtype, rows, columns, block)
    error = torch.from_numpy(data.draw(arrays(dtype, d, elements=finite | st.sampled_from([inf, nan]))))
    kept = error.clone()
    answer = cpu.serve_signs(scale, bits, columns, block, error, ratio, 1.5)
    expected = reference.serve_signs(scale, bits, columns, block, error, ratio, 1.5)
    same(error, kept)
    assert torch.equal(answer[1], expected[1])
    eps = torch.finfo(scale.dtype).eps * (1 if scale.dtype == torch.float32 else columns)
    tiny = torch.finfo(scale.dtype).smallest_normal * torch.finfo(scale.dtype).eps
    torch.testing.assert_close(answer[0], expected[0], rtol=eps, atol=tiny, equal_nan=True)
    other = error.clone()
    cpu.settle_served_signs(scale, bits, *answer, columns, block, error, ratio)
    reference.settle_served_signs(scale, bits, *answer, columns, block, other, ratio)
    same(error, other)


def test_a_workers_and_a_servers_passes_have_the_same_bits_in_company() -> None:
    g = torch.Generator().manual_seed(0)
    sizes, W, block = (1, 7, 700, 5000), 3, 512
    columns = [-(-d // W) for d in sizes]
    encoded = [
        cpu.encode_signs(torch.randn(d, generator=g), W, n, block, 1.5) for d, n in zip(sizes, columns, strict=True)
    ]
    means = [(scale * 2, ~bits) for scale, bits in encoded]
    workers = [(torch.randn(d, generator=g), torch.randn(d, generator=g)) for d in sizes]
    alone = [(x.clone(), e.clone()) for x, e in workers]
    kernels.settle_signs(
        [(*s, *m, n, block, *w, 0.3) for s, m, n, w in zip(encoded, means, columns, workers, strict=True)]
    )
    servers = [torch.randn(n, generator=g) for n in columns]
    rest = list(zip(encoded, columns, servers, strict=True))
    answers = kernels.serve_signs([(*s, n, block, e, 0.3, 1.5) for s, n, e in rest])
    for signs, mean, n, found, own in zip(encoded, means, columns, workers, alone, strict=True):
        cpu.settle_signs(*signs, *mean, n, block, *own, 0.3)
        assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True))
    left = [e.clone() for e in servers]
    kernels.settle_served_signs([(*s, *a, n, block, e, 0.3) for (s, n, e), a in zip(rest, answers, strict=True)])
    for (signs, n, found), answer, own in zip(rest, answers, left, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(answer, cpu.serve_signs(*signs, n, block, own, 0.3, 1.5), strict=True)
        )
        cpu.settle_served_signs(*signs, *answer, n, block, own, 0.3)
        assert torch.equal(found, own)


@relaxed
@given(vectors(specials=(0.0, -0.0, inf, -inf)), blocks)
def test_decoded_signs_are_those_of_x(case: tuple[Tensor, int, int], block: int) -> None:
    x, rows, columns = case
    out = torch.full_like(x, nan)
    ((scale, bits),) = kernels.encode_signs([(x, rows, columns, block, 1.0)])
    kernels.decode_signs([(scale, bits, columns, block, out)])
    assert torch.equal(out.signbit(), x < 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_many_vectors_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    wide, g = torch.promote_types(dtype, torch.float32), torch.Generator().manual_seed(0)
    vectors = [torch.randn(d, generator=g).to(dtype) for d in (1, 7, 700, 5000)]
    errors = [torch.randn(len(x), generator=g, dtype=wide) for x in vectors]
    given = [(Sum(x, e, 0.5), 3, -(-len(x) // 3), 512, 1.5) for x, e in zip(vectors, errors, strict=True)]
    given += [(x, 2, -(-len(x) // 2), 64, 1.0) for x in vectors]
    found = kernels.encode_signs(given)
    assert all(
        torch.equal(a, b)
        for args, signs in zip(given, found, strict=True)
        for a, b in zip(signs, cpu.encode_signs(*args), strict=True)
    )
    into = [torch.randn(x.numel(), generator=g, dtype=wide) for x, *_ in given]
    expected = [out.clone() for out in into]
    layouts = [(*signs, columns, block) for signs, (_, _, columns, block, _) in zip(found, given, strict=True)]
    kernels.add_signs([(*signs, out, 0.25, out, False) for signs, out in zip(layouts, into, strict=True)])
    for signs, out, alone in zip(layouts, into, expected, strict=True):
        cpu.add_signs(*signs, alone, 0.25, alone, False)
        assert torch.equal(out, alone)
    left = [e.clone() for e in errors]
    sums = zip(layouts, vectors, left, strict=False)
    kernels.add_signs([(*signs, Sum(x, e, 0.5), -1.0, e, False) for signs, x, e in sums])
    for signs, x, e, error in zip(layouts, vectors, left, errors, strict=False):
        cpu.add_signs(*signs, Sum(x, error, 0.5), -1.0, error, False)
        assert torch.equal(e, error)


def test_rows_that_lie_apart_are_read_where_they_are() -> None:
    """As in the answer of a fused collective, which is not copied to be read."""
    x, columns = torch.randn(4 * 100), 100
    scale, bits = cpu.encode_signs(x, 4, columns, 32, 1.0)
    apart = torch.full((4, 50), 255, dtype=torch.uint8)[:, 7 : 7 + bits.shape[1]].copy_(bits)
    strided = torch.full((4, 2 * scale.shape[1]), nan)[:, ::2].copy_(scale)
    for kernel in (cpu, reference):
        outs = torch.empty(2, 400)
        for out, (s, b) in zip(outs, [(scale, bits), (strided, apart)], strict=True):
            kernel.decode_signs(s, b, columns, 32, out)
        assert torch.equal(*outs)
        sums = torch.zeros(2, 100)
        for out, (s, b) in zip(sums, [(scale, bits), (strided, apart)], strict=True):
            kernel.add_signs(s, b, columns, 32, out, 0.5, out, True)
        assert torch.equal(*sums)
        settled, served = torch.ones(2, 2, 400), torch.ones(2, 100)
        answers = []
        for (gradient, error), own, (s, b) in zip(settled, served, [(scale, bits), (strided, apart)], strict=True):
            kernel.settle_signs(scale, bits, s, b, columns, 32, gradient, error, 0.5)
            answers.append(kernel.serve_signs(s, b, columns, 32, own, 0.5, 1.0))
            kernel.settle_served_signs(s, b, *answers[-1], columns, 32, own, 0.5)
        assert torch.equal(*settled)
        assert torch.equal(*served)
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


@relaxed
@given(arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(0, 40))), st.integers(1, 8))
def test_packed_bits_equal_reference_and_come_back(codes: np.ndarray, bits: int) -> None:
    rows = torch.from_numpy(codes & (2**bits - 1))
    packed = cpu.pack_bits(rows, bits)
    assert packed.shape == (len(rows), -(-rows.shape[1] * bits // 8))
    assert torch.equal(packed, reference.pack_bits(rows, bits))
    for kernel in (cpu, reference):
        assert torch.equal(kernel.unpack_bits(packed, bits, rows.shape[1]), rows)


@relaxed
@given(vectors(), blocks, st.integers(2, 8), st.integers(0, 2**56 - 1))
def test_levels_equal_reference(case: tuple[Tensor, int, int], block: int, bits: int, key: int) -> None:
    assert_same_levels(*case, block, bits, inf, key)


@relaxed
@given(layouts(), dtypes, blocks, st.integers(2, 8), st.integers(0, 2**56 - 1), st.data())
def test_levels_of_the_two_norm_equal_reference(
    layout: tuple[int, int, int], dtype: type, block: int, bits: int, key: int, data: st.DataObject
) -> None:
    """Of numbers whose squares add up alike in any order."""
    rows, columns, d = layout
    x = torch.from_numpy(data.draw(arrays(dtype, d, elements=st.integers(-2000, 2000) | st.sampled_from([inf, nan]))))
    assert_same_levels(x, rows, columns, block, bits, 2, key)


def assert_same_levels(x: Tensor, rows: int, columns: int, block: int, bits: int, norm: float, key: int) -> None:
    scale, codes = cpu.encode_levels(x, rows, columns, block, bits, norm, key)
    expected, expected_codes = reference.encode_levels(x, rows, columns, block, bits, norm, key)
    torch.testing.assert_close(scale, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(codes, expected_codes)
    for alpha in (1.0, -1 / 3):
        outs = [torch.empty_like(x), torch.empty_like(x)]
        for kernel, out in zip((cpu, reference), outs, strict=True):
            kernel.add_levels(scale, codes, columns, block, bits, x, alpha, out, False)
        torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)


@relaxed
@given(
    arrays(np.float32, st.integers(0, 1200), elements=st.integers(-1000, 1000)),
    st.sampled_from([1, 3, 5, 7]),
    st.integers(1, 40),
    st.integers(0, 2**56 - 1),
)
def test_sketches_equal_reference(x: np.ndarray, rows: int, columns: int, key: int) -> None:
    """Of whole numbers, whose sums are exact in any order."""
    v = torch.from_numpy(x)
    sketch = cpu.count_sketch(v, rows, columns, key)
    assert torch.equal(sketch, reference.count_sketch(v, rows, columns, key))
    assert torch.equal(cpu.estimate(sketch, len(v), key), reference.estimate(sketch, len(v), key))


def test_hashes_spread_evenly_and_rows_are_independent() -> None:
    d, columns = 100_000, 50
    ones = torch.ones(d)
    places, signs = [], []
    for salt in reference.row_keys(5, 1234567890123456):
        place, sign = reference._hashed(d, columns, salt, ones)
        count = place.bincount(minlength=columns)
        assert 0.4 < count.double().var() / count.double().mean() < 1.8  # as if thrown at random
        places.append(place.float())
        signs.append(sign)
    assert (torch.corrcoef(torch.stack(places + signs)) - torch.eye(10)).abs().max() < 0.02


def test_uniform_numbers_are_uniform_and_depend_on_all_of_the_key() -> None:
    keys = [0, 1, 1 << 31, 1 << 32, 1 << 55]
    draws = torch.stack([reference.uniform(100_000, key, torch.device("cpu")) for key in keys])
    assert draws.min() >= 0 and draws.max() < 1
    assert ((draws.mean(1) - 0.5).abs() < 0.005).all() and ((draws.var(1) * 12 - 1).abs() < 0.02).all()
    assert (torch.corrcoef(torch.cat([draws, draws.roll(1, 1)])) - torch.eye(10)).abs().max() < 0.02


@pytest.mark.parametrize(
    ("most", "sizes"), [(0.5, (9 / 4, 5 / 6)), (1.0, (9 / 2, 5 / 3)), (1.1, (41 / 9, 5.5 / 3)), (1.5, (41 / 9, 11 / 5))]
)
@pytest.mark.parametrize("kernel", [cpu, reference])
def test_encode_by_hand(kernel: kernels.Kernels, most: float, sizes: tuple[float, float]) -> None:
    x = torch.tensor([0.0, -0.0, -1, 2, nan, -inf, inf, -3, 4, -5, 1, -1, 3])
    scale, bits = kernel.encode_signs(x, 3, 10, 8, most)
    assert bits.tolist() == [[0b01001011, 0b01], [0b101, 0], [0, 0]]
    assert scale[0, 0].isnan()
    assert torch.equal(scale[0, 1], torch.tensor(sizes[0]))
    assert torch.equal(scale[1:], torch.tensor([[sizes[1], 0], [0, 0]]))  # of the real numbers alone


@pytest.mark.parametrize("kernel", [cpu, reference])
def test_add_by_hand(kernel: kernels.Kernels) -> None:
    out = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    bits = torch.tensor([[0b101], [0b10]], dtype=torch.uint8)
    kernel.add_signs(torch.tensor([[2.0], [8.0]]), bits, 3, 8, out, 0.5, out, False)
    assert out.tolist() == [2, 0, 2, -3, 5]


@pytest.mark.parametrize("kernel", [cpu, reference])
def test_an_infinite_row_has_an_infinite_scale(kernel: kernels.Kernels) -> None:
    assert kernel.encode_signs(torch.tensor([1.0, -inf]), 1, 2, 8, 1.5)[0].tolist() == [[inf]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1024, 100_008])
def test_long_rows(dtype: torch.dtype, block: int) -> None:
    x = torch.randn(300_001, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert_same_encoding(x, 3, 100_003, block)
    assert_same_decoding(*cpu.encode_signs(x, 3, 100_003, block, 1.5), 100_003, block, x)


def test_non_contiguous() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).t()[2, 1::3]
    assert not x.is_contiguous()
    assert_same_encoding(x, 2, 7, 8)
    scale, bits = reference.encode_signs(x, 2, 7, 16, 1.5)
    assert_same_decoding(scale.expand(2, 2)[:, 1:], bits.t().contiguous().t(), 7, 16, x)


def test_wrong_shapes_are_refused() -> None:
    scale, bits, out = torch.ones(2, 1), torch.zeros(2, 3, dtype=torch.uint8), torch.empty(48)
    cpu.decode_signs(scale, bits, 24, 24, out)
    for wrong in [(scale, bits, 25, 32, out), (scale[:1], bits, 24, 24, out), (scale, bits, 24, 24, torch.empty(49))]:
        with pytest.raises(AssertionError):
            cpu.decode_signs(*wrong)
    with pytest.raises(AssertionError):
        cpu.add_signs(scale, bits, 24, 24, torch.empty(47), 1.0, out, False)


@st.composite
def magnitudes(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Few different ones, so that many are equal, or many, of all sizes."""
    dtype, d = draw(dtypes), draw(st.integers(1, 60))
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, 2.0, inf, -inf, nan, -nan])
    elements = draw(st.sampled_from([few, st.floats(width=np.finfo(dtype).bits)]))
    return torch.from_numpy(draw(arrays(dtype, d, elements=elements))), draw(st.integers(1, d))


@relaxed
@given(magnitudes())
def test_top_k_equals_reference(case: tuple[Tensor, int]) -> None:
    x, k = case
    size = [inf if value != value else abs(value) for value in x.tolist()]
    expected = sorted(sorted(range(len(x)), key=lambda i: (-size[i], i))[:k])
    for kernel in (cpu, reference):
        values, places = kernel.top_k(x, k)
        assert places.tolist() == expected
        torch.testing.assert_close(values, x[places], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 3_000, 299_999, 300_001])
def test_top_k_of_many(dtype: torch.dtype, k: int) -> None:
    x = torch.randn(300_001, dtype=dtype, generator=torch.Generator().manual_seed(0)).pow(3)
    for vector in (x, x.round(), x.expand(2, -1).mT.flatten()[::2]):
        values, places = cpu.top_k(vector, k)
        assert torch.equal(places, reference.top_k(vector, k)[1])
        assert torch.equal(values, vector[places])
        assert vector[places].abs().min() == vector.abs().topk(k).values[-1]


def test_top_k_refuses_more_than_there_are() -> None:
    for k in (0, 4):
        with pytest.raises(AssertionError):
            cpu.top_k(torch.ones(3), k)


def test_threads_agree() -> None:
    x = torch.randn(200_004, generator=torch.Generator().manual_seed(0))
    scale, bits = cpu.encode_signs(x, 4, 50_001, 1024, 1.5)
    with ThreadPoolExecutor(4) as pool:
        for s, b in pool.map(lambda _: cpu.encode_signs(x, 4, 50_001, 1024, 1.5), range(16)):
            assert torch.equal(s, scale)
            assert torch.equal(b, bits)


def test_meta_takes_the_reference() -> None:
    x = torch.empty(39, device="meta")
    ((scale, bits),) = kernels.encode_signs([(x, 3, 13, 8, 1.0)])
    assert (scale.shape, bits.shape, scale.device.type) == ((3, 2), (3, 2), "meta")
    kernels.decode_signs([(scale, bits, 13, 8, x)])
    scale, codes = kernels.encode_levels(x, 3, 13, 8, 5, inf, key=1)
    assert (scale.shape, codes.shape, codes.device.type) == ((3, 2), (3, 9), "meta")
    kernels.add_levels(scale, codes, 13, 8, 5, x, 1.0, out=x)
    sketch = kernels.count_sketch(x, 3, 7, key=1)
    assert (sketch.shape, kernels.estimate(sketch, 39, key=1).shape) == ((3, 7), (39,))
    values, places = kernels.top_k(x, 5)
    assert (values.shape, values.device.type) == ((5,), "meta")
    assert (places.shape, places.dtype, places.device.type) == ((5,), torch.int64, "meta")


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, cpu), (torch.float64, cpu), (torch.bfloat16, reference)]
)
def test_dispatch(dtype: torch.dtype, expected: kernels.Kernels) -> None:
    assert kernels._for(torch.empty(1, dtype=dtype)) is expected
