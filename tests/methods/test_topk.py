from __future__ import annotations

import pytest
import torch

import thinwire as tw
from thinwire.core.value import Sparse
from thinwire.methods.topk import narrow, widened

torch.set_num_threads(1)

ALL = "min_saving=0"


def places(x, k):
    """Of the k largest magnitudes; of equal ones the first."""
    return sorted(sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:k])


class Paper:
    """Algorithm 1 of arXiv 1809.07599 on each worker, its memory in units of the gradient."""

    def __init__(self, d, workers):
        self.m = [torch.zeros(d, dtype=torch.float64) for _ in range(workers)]

    def step(self, inputs, k):
        out = torch.zeros_like(self.m[0])
        for i, x in enumerate(inputs):
            p = self.m[i] + x.flatten()
            sent = torch.zeros_like(p)
            for j in places(p.tolist(), k):
                sent[j] = p[j]
            self.m[i] = p - sent
            out += sent / len(inputs)
        return out.view(inputs[0].shape)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("ratio", "k"), [(0.01, 1), (0.1, 8), (0.103, 8), (0.5, 39), (1, 77)])
def test_it_is_the_papers_algorithm(workers, ratio, k):
    sim, paper = tw.Simulation(f"topk:ratio={ratio},{ALL}", workers), Paper(77, workers)
    for step in range(6):
        g = torch.Generator().manual_seed(step)
        inputs = [torch.randn(7, 11, generator=g, dtype=torch.float64) for _ in range(workers)]
        out = sim.reduce([{"w": x} for x in inputs])[0]["w"]
        torch.testing.assert_close(out, paper.step(inputs, k), rtol=1e-12, atol=1e-12)
        assert out.count_nonzero() <= k * workers
    for state, m in zip(sim.states, paper.m, strict=True):
        torch.testing.assert_close(state["w"].error.flatten(), m, rtol=1e-12, atol=1e-12)


def test_by_hand():
    sim = tw.Simulation(f"topk:ratio=0.4,{ALL}", 2)  # two of five
    inputs = [torch.tensor([1.0, -4, 2, 0, 3]), torch.tensor([8.0, 1, 1, 1, -1])]
    out = sim.reduce([{"w": x} for x in inputs])[0]["w"]
    assert out.tolist() == [4, -1.5, 0, 0, 1.5]  # of the equal ones on the second worker, the first
    assert sim.states[0]["w"].error.tolist() == [1, 0, 2, 0, 0]
    assert sim.states[1]["w"].error.tolist() == [0, 0, 1, 1, -1]


def test_what_was_sent_is_exactly_gone_and_the_rest_exactly_kept():
    sim = tw.Simulation("topk:ratio=0.05", 2)
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    out = sim.reduce([{"w": x}, {"w": x}])[0]["w"]
    assert out.count_nonzero() == 60
    assert torch.equal(out + sim.states[0]["w"].error, x)


@pytest.mark.parametrize(("d", "width"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
@pytest.mark.parametrize("workers", [2, 4])
def test_an_entry_is_a_value_and_as_few_bytes_of_place_as_the_tensor_needs(d, width, workers):
    k = -(-d // 100)
    assert tw.price("topk", {"w": (d,)}, workers) == [("all_gather", (workers - 1) * k * (4 + width))]


@pytest.mark.parametrize("d", [1, 200, 256, 257, 32_769, 65_536, 65_537, 1 << 31, 1 << 32])
def test_narrow_places_come_back(d):
    indices = torch.tensor([0, d // 2, d - 1])
    assert torch.equal(widened(narrow(indices, d)), indices)


def test_with_many_workers_it_goes_dense():
    assert [op for op, _ in tw.price("topk:ratio=0.01", {"w": (100, 100)}, 16)] == ["all_gather"]
    assert [op for op, _ in tw.price("topk:ratio=0.01", {"w": (100, 100)}, 128)] == ["all_reduce"]


@pytest.mark.parametrize("ratio", [0, -0.1, 1.5, "nan"])
@pytest.mark.parametrize("name", ["topk", "randk", "dgc", "gtopk"])
def test_a_ratio_out_of_range_is_refused(name, ratio):
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\]"):
        tw.method(f"{name}:ratio={ratio}")


def test_rows_of_a_sparse_value_add_up():
    value = Sparse(torch.tensor([[0, 3], [3, 1]]), torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    out = torch.full((2, 2), 5.0)
    value.write(out)
    assert out.tolist() == [[1, 8], [0, 6]]
    value.subtract(torch.ones(2, 2), out)
    assert out.tolist() == [[0, -7], [1, -5]]
    value.clear(out)
    assert out.tolist() == [[0, 0], [1, 0]]
    assert value.finite()
    assert not Sparse(torch.tensor([0]), torch.tensor([torch.inf])).finite()
