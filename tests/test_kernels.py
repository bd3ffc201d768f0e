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
from thinwire.kernels import cpu, reference

relaxed = settings(deadline=None)  # the first call compiles
dtypes = st.sampled_from([np.float32, np.float64])
blocks = st.sampled_from([8, 16, 24, 72, 1024])
shapes = st.tuples(st.integers(1, 4), st.integers(1, 70)) | st.tuples(st.integers(1, 70))


@st.composite
def tensors(draw: st.DrawFn, specials: tuple[float, ...] = (0.0, -0.0, inf, -inf, nan)) -> Tensor:
    dtype = draw(dtypes)
    most = float(np.finfo(dtype).max / 128)  # no row of finite numbers overflows
    finite = st.floats(-most, most, width=np.finfo(dtype).bits)
    return torch.from_numpy(draw(arrays(dtype, draw(shapes), elements=finite | st.sampled_from(specials))))


@st.composite
def encodings(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """Any scale and any bytes, padding included."""
    *lead, n = draw(shapes)
    dtype, block = draw(dtypes), draw(blocks)
    scale = draw(arrays(dtype, (*lead, -(-n // block)), elements=st.floats(width=np.finfo(dtype).bits)))
    bits = draw(arrays(np.uint8, (*lead, -(-n // 8))))
    return torch.from_numpy(scale), torch.from_numpy(bits), n, block


def full(x: Tensor) -> Tensor:
    return x.new_full((*x.shape[:-1], 1), x.shape[-1])


def assert_same_encoding(x: Tensor, sizes: Tensor, block: int) -> None:
    scale, bits = cpu.encode_signs(x, sizes, block)
    expected, expected_bits = reference.encode_signs(x, sizes, block)
    assert bits.dtype == torch.uint8
    assert torch.equal(bits, expected_bits)
    # Summed in float64, a float32 scale is at most one ulp off; a float64 one has each addition's rounding.
    info = torch.finfo(x.dtype)
    ulps = 1 if x.dtype == torch.float32 else x.shape[-1]
    torch.testing.assert_close(
        scale, expected, rtol=ulps * info.eps, atol=info.smallest_normal * info.eps, equal_nan=True
    )


def assert_same_decoding(scale: Tensor, bits: Tensor, n: int, block: int) -> None:
    out, expected = cpu.decode_signs(scale, bits, n, block), reference.decode_signs(scale, bits, n, block)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    real = ~expected.isnan()
    assert torch.equal(out[real].signbit(), expected[real].signbit())


@relaxed
@given(tensors(), st.data())
def test_encode_equals_reference(x: Tensor, data: st.DataObject) -> None:
    sizes = data.draw(arrays(np.float64, (*x.shape[:-1], 1), elements=st.integers(0, x.shape[-1])))
    assert_same_encoding(x, torch.from_numpy(sizes).to(x.dtype), data.draw(blocks))


@relaxed
@given(encodings())
def test_decode_equals_reference(encoding: tuple[Tensor, Tensor, int, int]) -> None:
    assert_same_decoding(*encoding)


@relaxed
@given(tensors(specials=(0.0, -0.0, inf, -inf)), blocks)
def test_decoded_signs_are_those_of_x(x: Tensor, block: int) -> None:
    out = kernels.decode_signs(*kernels.encode_signs(x, full(x), block), x.shape[-1], block)
    assert out.dtype == x.dtype
    assert torch.equal(out.signbit(), x < 0)


@pytest.mark.parametrize("kernel", [cpu, reference])
def test_encode_by_hand(kernel: kernels.Kernels) -> None:
    x = torch.tensor([[0.0, -0.0, -1, 2, nan, -inf, inf, -3, 4, -5], [1, -1, 0, 0, 0, 0, 0, 0, 0, 0]])
    scale, bits = kernel.encode_signs(x, torch.tensor([[10.0], [0.0]]), 8)
    assert bits.tolist() == [[0b01001011, 0b01], [0b11111101, 0b11]]
    assert scale[0, 0].isnan()
    assert scale[0, 1] == 4.5  # of the last two columns
    assert scale[1].tolist() == [2, 0]  # a block of no real columns is divided by 1


@pytest.mark.parametrize("kernel", [cpu, reference])
def test_padding_takes_no_part_in_a_blocks_scale(kernel: kernels.Kernels) -> None:
    x = torch.cat([torch.ones(11), torch.zeros(9)])
    scale, _ = kernel.encode_signs(x, torch.tensor([11.0]), 8)
    assert scale.tolist() == [1, 1, 0]


@pytest.mark.parametrize("kernel", [cpu, reference])
def test_an_infinite_row_has_an_infinite_scale(kernel: kernels.Kernels) -> None:
    x = torch.tensor([1.0, -inf])
    assert kernel.encode_signs(x, full(x), 8)[0].tolist() == [inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1024, 100_008])
def test_long_rows(dtype: torch.dtype, block: int) -> None:
    x = torch.randn(3, 100_003, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert_same_encoding(x, full(x), block)
    assert_same_decoding(*cpu.encode_signs(x, full(x), block), 100_003, block)


def test_non_contiguous() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).t()[::2, 1::3]
    assert not x.is_contiguous()
    assert_same_encoding(x, full(x), 8)
    scale, bits = reference.encode_signs(x, full(x), 16)
    assert_same_decoding(scale.expand(3, 2)[:, 1:], bits.t().contiguous().t(), x.shape[-1], 16)


def test_a_payload_of_the_wrong_shape_is_refused() -> None:
    scale, bits = torch.ones(2, 1), torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shape"):
        cpu.decode_signs(scale, bits, 25, 32)
    with pytest.raises(RuntimeError, match="shape"):
        cpu.decode_signs(scale[:1], bits, 24, 24)


def test_threads_agree() -> None:
    x = torch.randn(4, 50_001, generator=torch.Generator().manual_seed(0))
    scale, bits = cpu.encode_signs(x, full(x), 1024)
    with ThreadPoolExecutor(4) as pool:
        for s, b in pool.map(lambda _: cpu.encode_signs(x, full(x), 1024), range(16)):
            assert torch.equal(s, scale)
            assert torch.equal(b, bits)


def test_meta_takes_the_reference() -> None:
    x = torch.empty(3, 13, device="meta")
    scale, bits = kernels.encode_signs(x, full(x), 8)
    assert (scale.shape, bits.shape, scale.device.type) == ((3, 2), (3, 2), "meta")
    assert kernels.decode_signs(scale, bits, 13, 8).shape == x.shape


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, cpu), (torch.float64, cpu), (torch.bfloat16, reference)]
)
def test_dispatch(dtype: torch.dtype, expected: kernels.Kernels) -> None:
    assert kernels._for(torch.empty(1, dtype=dtype)) is expected
