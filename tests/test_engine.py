"""The engine under DDP, in real processes over gloo."""

from __future__ import annotations

import copy
import math
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests import workers
from tests.models import Bag, bag_means, batch, flat, gradients, grads, mlp, train_step
from tests.rows import ROWS
from thinwire.core import price
from thinwire.runtime.messages import CALLS, Plan, best, plan

EACH_BUCKET = 1000
"""More messages than there are buckets."""
JOINED = ["acp:rank=2", "powersgd:rank=2", "dist-ef-block:momentum=0.9", "fp16", "topk:ratio=0.1"]
EQUAL = {name: (16, 16) for name in "abcd"}


def _plain_or_attached(rank, _world, spec, ddp_options):
    model = DDP(mlp(), bucket_cap_mb=0.01, **ddp_options)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if spec:
        tw.attach(model, spec)
    for step in range(5):
        train_step(model, opt, rank, step)
    return flat(model)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_dense_is_ddp_bit_for_bit(options):
    plain = workers.run(_plain_or_attached, 3, None, options)
    ours = workers.run(_plain_or_attached, 3, "dense", options)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def _every_row(rank, _world, bucket_cap_mb, dtype):
    return {row.spec: bag_means(rank, row.spec, row.warm_up + 4, bucket_cap_mb, dtype) for row in ROWS}


def _simulated(row, world, dtype=torch.float32):
    sim = tw.Simulation(row.spec, world)
    return [sim.reduce([gradients(r, s, dtype=dtype) for r in range(world)])[0] for s in range(row.warm_up + 4)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gloo_computes_what_the_simulation_does(world):
    """Bit for bit with two workers; with three the order of a sum may differ."""
    by_rank = workers.run(_every_row, world, 0.001, torch.float32)
    for row in ROWS:
        expected = _simulated(row, world)
        for means in (result[row.spec] for result in by_rank):
            for step, (got, want) in enumerate(zip(means, expected, strict=True)):
                for name in want:
                    if world <= 2:
                        assert torch.equal(got[name], want[name]), (row.spec, step, name)
                    else:
                        assert torch.equal(got[name], by_rank[0][row.spec][step][name])
                        slack = 1e-4 + 8 * row.rounding
                        assert torch.allclose(got[name], want[name], rtol=slack, atol=slack), (row.spec, step, name)


def test_how_buckets_are_cut_does_not_matter():
    many, one = (workers.run(_every_row, 2, cap, torch.float32)[0] for cap in (0.001, 25))
    for row in ROWS:
        for a, b in zip(many[row.spec], one[row.spec], strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a), row.spec


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients(dtype):
    for means in workers.run(_every_row, 2, 0.001, dtype):
        for row in ROWS:
            for got, want in zip(means[row.spec], _simulated(row, 2, dtype), strict=True):
                assert all(t.dtype == dtype for t in got.values())
                assert all(torch.equal(got[name], want[name]) for name in got), row.spec


def _plain_narrow(rank, _world, dtype):
    model = DDP(Bag(dtype=dtype), bucket_cap_mb=0.001)
    means = []
    for step in range(4):
        model.zero_grad()
        model(gradients(rank, step, dtype=dtype)).backward()
        means.append(grads(model.module))
    return means


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dense_is_ddp_in_narrow_types_too(dtype):
    plain = workers.run(_plain_narrow, 2, dtype)[0]
    ours = workers.run(_every_row, 2, 0.001, dtype)[0]["dense"]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(plain, ours, strict=True) for name in a)


def _bytes_of_narrow(rank, _world):
    model = DDP(Bag(dtype=torch.bfloat16))
    sync = tw.attach(model, "acp:rank=2,after=2")
    for step in range(2):
        model(gradients(rank, step, dtype=torch.bfloat16)).backward()
    return sync.stats()


def test_a_dense_step_of_narrow_gradients_is_as_narrow_on_the_wire():
    stats = workers.run(_bytes_of_narrow, 2)[0]
    assert stats["bytes_sent"] == stats["bytes_dense"]


def _accumulate(rank, _world, spec):
    model = DDP(mlp(), bucket_cap_mb=0.01)
    sync = tw.attach(model, spec)
    for step in range(4):
        model.zero_grad()
        with model.no_sync():
            model(batch(rank, 2 * step)[0]).square().mean().backward()
        model(batch(rank, 2 * step + 1)[0]).square().mean().backward()
    return grads(model), sync.stats()["steps"]


def _once(rank, _world, spec):
    model = DDP(mlp(), bucket_cap_mb=0.01)
    tw.attach(model, spec)
    for step in range(4):
        model.zero_grad()
        losses = [model(batch(rank, 2 * step + i)[0]).square().mean() for i in range(2)]
        sum(losses).backward()
    return grads(model)


@pytest.mark.parametrize("spec", ["dense", "acp:rank=2", "dist-ef-block"])
def test_accumulation_sends_once_and_sends_the_sum(spec):
    (accumulated, steps), _ = workers.run(_accumulate, 2, spec)
    once, _ = workers.run(_once, 2, spec)
    assert steps == 4
    for name, grad in once.items():
        assert torch.allclose(accumulated[name], grad, rtol=1e-3, atol=1e-4)


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.even, self.odd = (nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, x, use_even):
        return (self.even if use_even else self.odd)(self.always(x)).square().mean()


def _branches(rank, world, spec):
    """Even steps use one branch, odd steps the other; step 6 uses one on rank 0 and the other elsewhere."""
    model = DDP(TwoBranches(), bucket_cap_mb=0.001, find_unused_parameters=True)
    sync = tw.attach(model, spec)
    applied = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
    put_in = copy.deepcopy(applied)
    for step in range(9):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step * 10 + rank))
        use_even = (rank == 0) if step == 6 else step % 2 == 0
        local = copy.deepcopy(model.module)
        local(x, use_even).backward()
        for name, p in local.named_parameters():
            put_in[name] += p.grad if p.grad is not None else 0
        model.zero_grad()
        model(x, use_even).backward()
        for name, p in model.module.named_parameters():
            if p.grad is not None:
                applied[name] += p.grad
    owed = {
        name: sync.method.withheld(sync.ledger.template(name), state, sync.ledger.context(name, rank, world))
        for name, state in sync.ledger.states.items()
    }
    if sync.method.whole:
        parts = torch.split(owed[""], [p.numel() for p in model.parameters()])
        owed = {n: part.view_as(p) for (n, p), part in zip(model.module.named_parameters(), parts, strict=True)}
    for tensors in (put_in, owed):
        for t in tensors.values():
            dist.all_reduce(t)
            t /= world
    return {name: (applied[name] + owed[name] - put_in[name]).abs().max().item() for name in applied}


@pytest.mark.parametrize(
    "spec",
    [
        "dense",
        "acp:rank=2",
        "powersgd:rank=2",
        "dist-ef-block",
        "dist-ef",
        "topk",
        "randk:ratio=0.1",
        "gtopk:ratio=0.1",
    ],
)
def test_an_unused_parameter_loses_nothing(spec):
    """What DDP drops for a branch that no rank used was never spent."""
    for left in workers.run(_branches, 2, spec):
        assert all(value < 1e-5 for value in left.values()), left


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.inner.bias.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.inner(self.embed(tokens)))


def _tied(rank, _world, spec):
    model = DDP(Tied(), bucket_cap_mb=0.001)
    frozen = model.module.inner.bias.clone()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    if spec:
        sync = tw.attach(model, spec)
    for step in range(4):
        tokens = torch.randint(50, (6, 4), generator=torch.Generator().manual_seed(step * 10 + rank))
        opt.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
    assert torch.equal(frozen, model.module.inner.bias)
    names = set(sync.state_dict()["states"]) if spec else set()
    return flat(model), names


def test_shared_and_frozen_parameters():
    (plain, _), _ = workers.run(_tied, 2, None)
    (dense, _), _ = workers.run(_tied, 2, "dense")
    (acp, names), (other, _) = workers.run(_tied, 2, "acp:rank=2")
    assert torch.equal(plain, dense)
    assert torch.equal(acp, other)
    assert names == {"embed.weight", "inner.weight"}


def _several(rank, _world):
    """Two models with methods of their own, trained by one loss and in one loop, and clipped."""
    a, b = DDP(mlp(0), bucket_cap_mb=0.01), DDP(mlp(1), bucket_cap_mb=0.01)
    tw.attach(a, "acp:rank=2")
    tw.attach(b, "dist-ef-block:momentum=0.9")
    opt = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    norms = []
    for step in range(5):
        x, y = batch(rank, step)
        opt.zero_grad()
        nn.functional.cross_entropy(a(x) + b(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_([*a.parameters(), *b.parameters()], 0.5).item())
        assert sum(p.grad.square().sum() for m in (a, b) for p in m.parameters()) <= 0.251
        opt.step()
    return flat(a), flat(b), norms


def test_several_models_in_one_process_and_clipping():
    (a0, b0, norms0), (a1, b1, norms1), _ = workers.run(_several, 3)
    assert torch.equal(a0, a1) and torch.equal(b0, b1) and norms0 == norms1


def _subgroup(rank, _world):
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    return bag_means({0: 0, 2: 1}[rank], "acp:rank=2", 4, group=group)


def test_a_process_group_that_is_not_the_default():
    first, outsider, last = workers.run(_subgroup, 3)
    pair = workers.run(_every_row, 2, 0.001, torch.float32)[0]["acp:rank=2"]
    assert outsider is None
    for got, other, want in zip(first, last, pair, strict=True):
        assert all(torch.equal(got[n], want[n]) and torch.equal(other[n], want[n]) for n in want)


def _torch_convention(rank, _world, registered):
    model = DDP(mlp(), bucket_cap_mb=0.01)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    if registered:
        sync = tw.Synchronizer("acp:rank=2")
        model.register_comm_hook(sync, tw.comm_hook)
    else:
        sync = tw.attach(model, "acp:rank=2")
    for step in range(4):
        train_step(model, opt, rank, step)
    return flat(model), sorted(sync.state_dict()["states"])


def test_register_comm_hook_needs_nothing_else():
    (attached, names), _ = workers.run(_torch_convention, 2, False)
    (hooked, same), _ = workers.run(_torch_convention, 2, True)
    assert torch.equal(attached, hooked)
    assert names == same == sorted(name for name, _ in mlp().named_parameters())


class Sleepy(tw.Method):
    """Two rounds, each after a nap whose length differs by rank and tensor."""

    def reduce(self, x, state, ctx):
        time.sleep(0.002 * ((ctx.rank * 7 + len(ctx.name) + ctx.step) % 5))
        first = yield from tw.method("dense").reduce(x.clone(), (), ctx)
        time.sleep(0.003 * ((ctx.rank * 3 + len(ctx.name)) % 4))
        second = yield from tw.method("dense").reduce(first[0].mean * (ctx.rank + 1), (), ctx)
        return second[0], state

    def __repr__(self):
        return "Sleepy()"


def _sleepy(rank, _world):
    return bag_means(rank, Sleepy(), 4)


def test_timing_does_not_reorder_collectives():
    results = workers.run(_sleepy, 3)
    for step, means in enumerate(results[0]):
        for name, got in means.items():
            mean = torch.stack([gradients(r, step)[name] for r in range(3)]).mean(0)
            assert torch.allclose(got, mean * 2, atol=1e-5)
            assert all(torch.equal(got, other[step][name]) for other in results)


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.6)
        return grad


def _overlap(rank, _world, spec):
    """The first layer's gradient takes long: the others' exchange must be over before it is there."""
    head, tail = nn.Linear(16, 16), nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.tail = head, tail

        def forward(self, x):
            return self.tail(Slow.apply(self.head(x)))

    model = DDP(Net(), bucket_cap_mb=0.0005)
    if spec in ("apm", "dist-ef-sgdm"):
        kinds = {"apm": lambda p: tw.optim.APMSqueeze(p, warmup_steps=1), "dist-ef-sgdm": tw.optim.DistEFBlockSGDM}
        opt = kinds[spec](model.parameters())
        sync = tw.attach(model, opt, messages=EACH_BUCKET)
    else:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = tw.attach(model, spec, messages=EACH_BUCKET)
    for step in range(3):
        sync.telemetry.tracing = step == 2
        opt.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        opt.step()
    ended = [s.end for s in sync.telemetry.spans if s.track == "wire"]
    last = max(ended)
    return len(ended), sum(last - end > 0.1 for end in ended)


@pytest.mark.parametrize("spec", ["acp:rank=2", "dist-ef-block", "apm", "dist-ef-sgdm"])
def test_communication_runs_under_backward(spec):
    for collectives, early in workers.run(_overlap, 2, spec):
        assert collectives >= 4
        assert early >= collectives // 2


def _cut(rank, _world, messages):
    """Each method's means, collectives in the last step, and the bytes of a message that it has settled on."""
    out = {}
    for spec in JOINED:
        model = DDP(Bag(), bucket_cap_mb=0.001)
        sync = tw.attach(model, spec, messages=messages)
        means = []
        for step in range(4):
            before = sync.stats()["collectives"]
            model.zero_grad()
            model(gradients(rank, step)).backward()
            means.append(grads(model.module))
        out[spec] = means, sync.stats()["collectives"] - before, sync._engine.cuts.parts
    return out


def test_how_many_messages_does_not_matter():
    """With two workers bit for bit; and one message has as many rounds as the method, however DDP cut its buckets."""
    shapes = {name: tuple(p.shape) for name, p in Bag().named_parameters()}
    one, each, chosen = (workers.run(_cut, 2, messages) for messages in (1, EACH_BUCKET, None))
    for spec in JOINED:
        for results in zip(one[0][spec][0], each[0][spec][0], chosen[0][spec][0], strict=True):
            assert all(torch.equal(results[0][name], other[name]) for other in results[1:] for name in other), spec
        assert chosen[0][spec][2] == chosen[1][spec][2], spec
        assert one[0][spec][1] == len(tw.price(spec, shapes, 2))
        assert each[0][spec][1] > one[0][spec][1]


def _resumed_cut(rank, _world, messages):
    """A run through, and one from its middle on that loads its state; the same four buckets from the first step on."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    ends = []
    model = DDP(Bag(EQUAL), bucket_cap_mb=0.001, find_unused_parameters=True)
    sync = tw.attach(model, "acp:rank=2", messages=messages)
    for step in range(8):
        if step == 4:
            middle = copy.deepcopy(sync.state_dict())
        model.zero_grad()
        model(gradients(rank, step, EQUAL)).backward()
    ends.append(grads(model.module))
    again = DDP(Bag(EQUAL), bucket_cap_mb=0.001, find_unused_parameters=True)
    sync = tw.attach(again, "acp:rank=2", messages=messages)
    sync.load_state_dict(middle)
    for step in range(4, 8):
        again.zero_grad()
        again(gradients(rank, step, EQUAL)).backward()
    ends.append(grads(again.module))
    return ends, sync.stats()["collectives"]


@pytest.mark.parametrize(("messages", "collectives"), [(1, 4), (2, 8)])
def test_resuming_with_as_many_messages_is_exact(messages, collectives):
    (through, resumed), count = workers.run(_resumed_cut, 3, messages)[0]
    assert count == collectives
    assert all(torch.equal(through[name], resumed[name]) for name in through)


@pytest.mark.parametrize("ratio", [1.0, 1.0001, 3.0, 16.0])
def test_the_best_number_of_messages_takes_the_least_time(ratio):
    for latency, wire in [(0.12, 0.04), (0.001, 0.04), (0.0003, 0.0005), (0.02, 3.5)]:
        last = {n: 1 / n if ratio == 1 else (ratio - 1) / (ratio**n - 1) for n in range(1, 200)}
        times = {n: n * latency + wire * share for n, share in last.items()}
        assert times[best(latency, wire, ratio)] <= 1.01 * min(times.values())


@pytest.mark.parametrize("spec", ["acp:rank=2", "dist-ef-block", "acp:rank=2,after=9"])
def test_delay_makes_one_message_and_a_slow_wire_several(spec):
    shapes = {name: (256, 256) for name in "abcdefgh"}
    whole = price.rounds(tw.method(spec.removesuffix(",after=9")), shapes, 4)
    far, thin = (
        SimpleNamespace(world=4, rank=0, straight=0.0, measure=lambda _, f=f: f) for f in ((0.12, 1e-8), (1e-4, 1e-5))
    )
    one_round = spec.startswith("acp")
    assert plan(tw.method(spec), shapes, far).price == whole[0]
    assert plan(tw.method(spec), shapes, far).cuts().parts == []
    assert plan(tw.method(spec), shapes, far, messages=3).cuts(9.0).parts == pytest.approx([1 / 3, 2 / 3])
    several = plan(tw.method(spec), shapes, thin)
    assert several.one_round == one_round
    number = len(several.cuts().parts) + 1
    assert number == round(math.sqrt(sum(whole) * 1e-5 / (len(whole) * (1e-4 + CALLS)))) > 5
    assert several.cuts().parts == pytest.approx([(k + 1) / number for k in range(number - 1)])


def test_a_wire_is_thin_where_an_uncompressed_step_takes_longer_on_it_than_backward():
    shapes = {name: (256, 256) for name in "abcdefgh"}
    wire = SimpleNamespace(world=4, rank=0, line=lambda: (0.001, 1e-6))
    (seconds,) = (1e-6 * size for size in price.rounds(tw.method("dense"), shapes, 4))
    dense = plan(tw.method("dense"), shapes, wire)
    assert [dense.cuts(backward).thin for backward in (0.0, 0.9 * seconds, 1.1 * seconds)] == [False, True, False]
    assert not dense.cuts(0.9 * seconds).guide
    assert not plan(tw.method("dense"), shapes, wire, messages=3).cuts(0.9 * seconds).thin


@pytest.mark.parametrize(
    ("latency", "wire", "backward"), [(0.001, 0.04, 0.35), (0.002, 0.12, 0.35), (0.001, 0.1, 0.05)]
)
def test_a_message_has_left_the_wire_when_the_next_one_comes(latency, wire, backward):
    """Or the wire is never idle: and what is left after backward is no more than of equal messages, which are more."""
    plan = Plan(100.0, True, None, latency, wire)
    cuts, equal = plan.cuts(backward).parts, plan.cuts().parts
    assert len(cuts) < len(equal) if backward > wire else cuts == equal
    ends = []
    for own in (cuts, equal):
        end, before = 0.0, 0.0
        for cut in [*own, 1.0]:
            arrived = backward * cut
            assert end <= arrived * 1.0001 or wire > backward
            end = max(end, arrived) + wire * (cut - before)
            before = cut
        ends.append(end + (1 + len(own)) * latency)
    assert ends[0] <= ends[1]


@pytest.mark.parametrize("spec", ["dense", "gtopk:ratio=0.1"])
def test_what_saves_nothing_or_is_one_message_anyway_is_not_joined(spec):
    assert workers.run(_priced, 2, spec) == [0.0, 0.0]


def _priced(rank, _world, spec):
    return tw.attach(DDP(Bag()), spec, messages=1)._engine.plan.price


def test_no_messages_is_refused():
    with pytest.raises(ValueError, match="messages must be at least 1, not 0"):
        tw.Synchronizer("acp:rank=2", messages=0)


def _counted(rank, world, spec):
    model = DDP(Bag(), bucket_cap_mb=25)
    sync = tw.attach(model, spec)
    for step in range(4):
        model.zero_grad()
        model(gradients(rank, step)).backward()
    return sync.stats()


@pytest.mark.parametrize("row", [row for row in ROWS if "metered_bytes_are_priced_bytes" not in row.exempt], ids=str)
def test_metered_bytes_are_priced_bytes(row):
    shapes = {name: tuple(p.shape) for name, p in Bag().named_parameters()}
    stats = workers.run(_counted, 2, row.spec)[0]
    priced = [call for step in range(4) for call in tw.price(row.spec, shapes, 2, step=step)]
    assert stats["steps"] == 4
    assert stats["bytes_sent"] == sum(size for _, size in priced)
    assert stats["bytes_dense"] == 4 * sum(size for _, size in tw.price("dense", shapes, 2))
    # DDP cuts its very first step into a small bucket and a large one
    assert len(priced) <= stats["collectives"] <= len(priced) + row.rounds
    assert all(stats[f"seconds_{what}"] >= 0 for what in ("compressing", "communicating", "exposed", "waiting"))
