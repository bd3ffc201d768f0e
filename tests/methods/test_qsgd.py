from __future__ import annotations

from math import inf

import pytest
import torch

import thinwire as tw
from thinwire.core.method import Context
from thinwire.methods.qsgd import StochasticLevels

torch.set_num_threads(1)

ALL = "min_saving=0"


def quantised(x, bits, block=512, key=0, norm=inf):
    out, C = torch.empty_like(x), StochasticLevels(bits, block, norm, key)
    (payload,) = C.encode([(x, 1, len(x))])
    C.decode([(payload, len(x), out)])
    return out


def vector(d, seed=0, heavy=False):
    x = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x**5 if heavy else x


@pytest.mark.parametrize("bits", range(2, 9))
def test_values_are_the_two_levels_around_the_number(bits):
    x, s = vector(200), 2 ** (bits - 1) - 1
    unit = x.abs().max() / s
    l = quantised(x, bits, block=200) / unit  # noqa: E741
    assert (l - l.round()).abs().max() < 1e-9
    assert (l - x / unit).abs().max() < 1
    assert l.abs().max() <= s + 1e-9
    assert (l.round() != (x / unit).round()).any()  # by chance, not to the nearest


def test_by_hand():
    """With 3 levels a side and a largest magnitude of 3, whole numbers pass exactly; a block has a scale of its own."""
    x = torch.tensor([3.0, -2, 1, 0, -0.0, -3, 2, -1, 300, -100, 200])
    assert torch.equal(quantised(x, 3, block=8), x)
    (payload,) = StochasticLevels(3, 8, inf, 0).encode([(x, 1, 11)])
    assert payload.scale.tolist() == [[3, 300]]
    codes = [6, 1, 4, 3, 3, 0, 5, 2, 6, 2, 5]  # levels + 3
    word = sum(code << 3 * j for j, code in enumerate(codes))
    assert payload.codes.tolist() == [list(word.to_bytes(5, "little"))]


@pytest.mark.parametrize("norm", [inf, 2])
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_it_is_unbiased_and_its_variance_within_the_bound(bits, heavy, norm):
    """Over many keys: the mean is x to within 5 standard errors, and a few draws where few go up."""
    x, trials, s = vector(64, heavy=heavy), 4000, 2 ** (bits - 1) - 1
    draws = torch.stack([quantised(x, bits, block=64, key=key * 2654435761, norm=norm) for key in range(trials)])
    most = torch.linalg.vector_norm(x, norm)
    a = s * x.abs() / most
    variance = (most / s) ** 2 * (a - a.floor()) * (1 - (a - a.floor()))
    assert ((draws.mean(0) - x).abs() <= 5 * (variance / trials).sqrt() + 10 * most / s / trials).all()
    measured = (draws - x).square().sum(1).mean()
    assert measured == pytest.approx(variance.sum().item(), rel=0.05)
    bound = min(64 / (4 * s**2) * most**2, most * x.abs().sum() / s)
    assert measured <= 1.01 * bound


def test_the_largest_magnitude_has_less_variance_than_the_two_norm():
    x = vector(512)
    largest, two = (
        torch.stack([(quantised(x, 4, key=key << 20, norm=norm) - x).square().sum() for key in range(50)]).mean()
        for norm in (inf, 2)
    )
    assert largest < two / 10


@pytest.mark.parametrize("norm", [inf, 2])
def test_a_number_that_is_all_of_its_norm_is_the_highest_level(norm):
    for dtype in (torch.float32, torch.float64):
        for value in torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=dtype) - 0.5:
            x = torch.zeros(16, dtype=dtype)
            x[3] = value
            torch.testing.assert_close(quantised(x, 4, block=16, norm=norm), x)


def test_workers_round_independently_and_their_noise_averages_out():
    x, spec = vector(4096), f"qsgd:bits=3,{ALL}"

    def noise(workers):
        out = tw.Simulation(spec, workers).reduce([{"w": x}] * workers)[0]["w"]
        return (out - x).square().sum().item()

    assert noise(16) == pytest.approx(noise(1) / 16, rel=0.2)


def test_chances_depend_on_seed_step_name_and_rank_and_on_nothing_else():
    keys = {
        Context(step, name, rank, 4, seed).key(f"{step}/{rank}")
        for step in range(3)
        for name in "ab"
        for rank in range(3)
        for seed in range(2)
    }
    assert len(keys) == 36
    x = {"w": vector(100)}
    sims = [tw.Simulation("qsgd", 2), tw.Simulation("qsgd", 2), tw.Simulation("qsgd", 2, seed=1)]
    sims[1].step = 1
    first, later, other = (sim.reduce([x, x])[0]["w"] for sim in sims)
    second = sims[0].reduce([x, x])[0]["w"]
    assert torch.equal(second, later)
    assert not torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("workers", [2, 5])
def test_exactly_as_many_bits_and_a_scale_a_block(bits, workers):
    d = 1000
    ((op, sent),) = tw.price(f"qsgd:bits={bits},block=128,{ALL}", {"w": (d,)}, workers)
    assert (op, sent) == ("all_gather", (workers - 1) * (d * bits // 8 + 4 * 8))


def test_where_it_would_cost_more_than_an_all_reduce_all_goes_dense():
    shapes = {"w": (64, 64)}
    assert tw.price("qsgd", shapes, 15)[0][0] == "all_gather"
    assert tw.price("qsgd", shapes, 16) == tw.price("dense", shapes, 16)


@pytest.mark.parametrize("option", ["bits=1", "bits=9", "block=0", "block=12", "block=-8", "norm=1", "norm=0"])
def test_bad_options_are_refused_by_name(option):
    with pytest.raises(ValueError, match=f"{option.partition('=')[0]} must be"):
        tw.method(f"qsgd:{option}")
