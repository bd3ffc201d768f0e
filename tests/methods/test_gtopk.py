from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.methods.test_topk import places
from tests.models import SHAPES, Bag, gradients
from thinwire.core.method import Method
from thinwire.methods.gtopk import GTopK, Merge, _packed, _unpacked
from thinwire.methods.topk import Entries

torch.set_num_threads(1)


class Spy(Method):
    """gTop-k without error feedback, that shows what each worker sent."""

    def __init__(self, ratio):
        self.inner, self.sent = GTopK(ratio=ratio), {}

    @property
    def whole(self):
        return True

    def reduce(self, x, state, ctx):
        out, state = yield from self.inner.reduce(x, state, ctx)
        self.sent[ctx.rank] = torch.zeros_like(x)
        out.sent.write(self.sent[ctx.rank])
        return out, state


def reduced(inputs, k):
    """The sum that all workers agree on, and what each has sent. Whole numbers make both exact."""
    spy = Spy(k / len(inputs[0]))
    outs = tw.Simulation(spy, len(inputs)).reduce([{"w": x} for x in inputs])
    assert all(torch.equal(outs[0]["w"], out["w"]) for out in outs)
    return (outs[0]["w"] * len(inputs)).round(), [spy.sent[rank] for rank in range(len(inputs))]


def tree(inputs, k):
    """The paper's tree by recursion over ranks, where each entry is a list of the (worker, value) it is made of."""

    def top(entries):
        return {i: entries[i] for i in sorted(entries, key=lambda i: (-abs(sum(v for _, v in entries[i])), i))[:k]}

    def merged(rank, stride):
        """What ``rank`` has when it has heard from all children nearer than ``stride``."""
        if stride == 1:
            x = inputs[rank].tolist()
            return {i: [(rank, x[i])] for i in places(x, k)}
        mine, child = merged(rank, stride // 2), rank + stride // 2
        if child >= len(inputs):
            return mine
        theirs = merged(child, stride // 2)
        return top({i: mine.get(i, []) + theirs.get(i, []) for i in mine.keys() | theirs.keys()})

    root = merged(0, 1 << (len(inputs) - 1).bit_length())
    total, sent = torch.zeros_like(inputs[0]), [torch.zeros_like(x) for x in inputs]
    for i, parts in root.items():
        for rank, value in parts:
            total[i] += value
            sent[rank][i] += value
    return total, sent


@st.composite
def cases(draw):
    world, d = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    rows = st.lists(st.integers(-9, 9), min_size=d, max_size=d)
    inputs = draw(st.lists(rows, min_size=world, max_size=world))
    return [torch.tensor(row, dtype=torch.float64) for row in inputs], draw(st.integers(1, d))


@settings(deadline=None, max_examples=300)
@given(cases())
def test_no_mass_is_lost_and_what_is_dropped_stays_with_its_sender(case):
    inputs, k = case
    total, sent = reduced(inputs, k)
    assert torch.equal(sum(sent), total)
    assert total.count_nonzero() <= k
    for x, mine in zip(inputs, sent, strict=True):
        assert mine.count_nonzero() <= k
        assert ((mine == x) | (mine == 0)).all()


@settings(deadline=None, max_examples=300)
@given(cases())
def test_it_is_the_papers_tree_with_each_entrys_origin_remembered(case):
    inputs, k = case
    total, sent = reduced(inputs, k)
    want_total, want_sent = tree(inputs, k)
    assert torch.equal(total, want_total)
    assert all(torch.equal(a, b) for a, b in zip(sent, want_sent, strict=True))


def test_an_entry_that_is_dropped_while_its_place_arrives_by_another_branch_is_returned():
    """Where the published code loses mass: worker 1's third place falls to worker 0's first, worker 3's arrives."""
    inputs = [torch.tensor(row, dtype=torch.float64) for row in ([5, 0, 0], [0, 0, 4], [0, 0, 1], [0, 0, 7])]
    total, sent = reduced(inputs, 1)
    assert total.tolist() == [0, 0, 8]
    assert [x.tolist() for x in sent] == [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 7]]


@pytest.mark.parametrize("world", range(1, 9))
def test_over_many_steps_all_that_was_put_in_is_applied_or_owed(world):
    sim = tw.Simulation("gtopk:ratio=0.05", world)
    applied, put_in = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for step in range(12):
        g = torch.Generator().manual_seed(step)
        inputs = [torch.randn(300, generator=g, dtype=torch.float64) for _ in range(world)]
        applied += sim.reduce([{"w": x} for x in inputs])[0]["w"]
        put_in += torch.stack(inputs).mean(0)
    torch.testing.assert_close(applied + sim.owed()["w"], put_in, rtol=1e-12, atol=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_marks_travel_as_bits(marks):
    packed = _packed(torch.tensor(marks))
    assert len(packed) == -(-len(marks) // 8)
    assert _unpacked(packed, len(marks)).tolist() == marks


def test_a_merge_by_hand():
    a = Entries(torch.tensor([3.0, -2.0, 5.0]), torch.tensor([1, 4, 9]))
    b = Entries(torch.tensor([2.0, 4.0, -5.0]), torch.tensor([4, 7, 9]))
    merge = Merge.of(a, b)  # {1: 3, 4: 0, 7: 4, 9: 0}: of the zeros, the first
    assert merge.kept.indices.tolist() == [1, 4, 7]
    assert merge.kept.values.tolist() == [3, 0, 4]
    ours, theirs = merge.origins(torch.tensor([True, True, False]))
    assert (ours.tolist(), theirs.tolist()) == ([True, True, False], [True, False, False])


D = 100_000
ENTRY = 4 + 4


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8, 16, 100])
def test_no_worker_sends_more_than_k_log_w(world):
    k, rounds = D // 100, math.ceil(math.log2(world))
    sent = [tw.price("gtopk:ratio=0.01", {"w": (D,)}, world, rank=rank) for rank in range(world)]
    assert all([op for op, _ in calls] == ["swap"] * 2 * rounds for calls in sent)
    totals = [sum(n for _, n in calls) for calls in sent]
    down = k * ENTRY + -(-k // 8)
    assert totals[0] == max(totals) == rounds * down
    # each but the root sends up once, and is sent down to once
    assert sum(totals) == (world - 1) * (k * ENTRY + down)


def test_bytes_grow_with_the_logarithm_where_top_k_grows_with_the_number():
    def sent(name, world):
        return sum(n for _, n in tw.price(f"{name}:ratio=0.001", {"w": (D,)}, world))

    assert [sent("gtopk", w) / sent("gtopk", 2) for w in (2, 4, 8, 16)] == [1, 2, 3, 4]
    assert [sent("topk", w) / sent("topk", 2) for w in (2, 4, 8, 16)] == [1, 3, 7, 15]


def _metered(rank, _world):
    model = DDP(Bag())
    sync = tw.attach(model, "gtopk:ratio=0.02")
    for step in range(2):
        model.zero_grad()
        model(gradients(rank, step)).backward()
    return sync.stats()["bytes_sent"]


def test_metered_bytes_are_priced_bytes_on_every_rank():
    priced = [sum(n for _, n in tw.price("gtopk:ratio=0.02", SHAPES, 5, rank=rank)) for rank in range(5)]
    assert workers.run(_metered, 5) == [2 * n for n in priced]
    assert len(set(priced)) > 1
