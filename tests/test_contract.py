"""The laws that every registry row obeys, in simulation."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.rows import ROWS, Row
from thinwire.core.method import Reduced
from thinwire.core.requests import AllReduce

SHAPES = {"w": (12, 20), "c": (6, 4, 3, 3), "b": (13,), "s": (), "one": (1,), "empty": (0, 4), "tiny": (2, 2)}
WORLDS = [1, 2, 3, 5]

LAWS = set()


def rows(test):
    """The law of every row that is not exempt from it by name."""
    law = test.__name__.removeprefix("test_")
    LAWS.add(law)
    return pytest.mark.parametrize("row", [row for row in ROWS if law not in row.exempt], ids=str)(test)


worlds = pytest.mark.parametrize("world", WORLDS)


def gradients(world, step, shapes=SHAPES, dtype=torch.float32):
    out = []
    for rank in range(world):
        g = torch.Generator().manual_seed(1000 * step + rank)
        out.append({name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()})
    return out


def mean(inputs, name):
    return torch.stack([tensors[name].double() for tensors in inputs]).mean(0)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flat_state(sim):
    """Every tensor and number of every worker's state."""
    leaves = []

    def walk(value):
        for part in value if isinstance(value, tuple) else [value]:
            walk(part) if isinstance(part, tuple) else leaves.append(part)

    for states in sim.states:
        for state in states.values():
            walk(state)
    return leaves


@rows
@worlds
def test_all_workers_get_the_same_bits(row, world):
    sim = tw.Simulation(row.spec, world)
    for step in range(row.warm_up + 4):
        outs = sim.reduce(gradients(world, step))
        assert all(equal(outs[0], out) for out in outs)
        assert {name: tuple(t.shape) for name, t in outs[0].items()} == SHAPES


@rows
@worlds
def test_mass_is_conserved(row: Row, world):
    """Applied + owed = all that the workers put in, their momentum included."""
    sim = tw.Simulation(row.spec, world)
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    put_in = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    momentum = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(row.warm_up + 6):
        inputs = gradients(world, step)
        out = sim.reduce(inputs)[0]
        for name in SHAPES:
            g = mean(inputs, name)
            momentum[name] = row.momentum * momentum[name] + g
            put_in[name] += g + row.momentum * momentum[name]
            applied[name] += out[name]
    owed = sim.owed()
    for name in SHAPES:
        if put_in[name].numel():
            left = (applied[name] + owed.get(name, 0) - put_in[name]).abs().max()
            assert left <= row.rounding * 6 * (1 + put_in[name].abs().max())


@rows
@worlds
def test_metered_bytes_are_priced_bytes(row, world):
    sim = tw.Simulation(row.spec, world)
    for step in range(row.warm_up + 3):
        before = sim.bytes_sent
        sim.reduce(gradients(world, step))
        assert sim.bytes_sent - before == sum(n for _, n in tw.price(row.spec, SHAPES, world, step=step))


@rows
def test_no_more_collectives_than_the_paper_has_rounds(row):
    assert len(tw.price(row.spec, SHAPES, 4)) == row.rounds
    if row.warm_up:
        assert [op for op, _ in tw.price(row.spec, SHAPES, 4, step=0)] == ["all_reduce"]


@rows
def test_compression_contracts(row):
    """A first step withholds no more than it was given: |x - out|^2 <= |x|^2, with one worker."""
    sim = tw.Simulation(row.spec, 1)
    shapes = {"w": (16, 16)}
    for _ in range(row.warm_up):
        sim.reduce([{"w": torch.zeros(16, 16)}])
    (x,) = gradients(1, 7, shapes)
    out = sim.reduce([x])[0]["w"] / (1 + row.momentum)
    assert (x["w"] - out).norm() < x["w"].norm()


@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_dtype(row, dtype):
    sim = tw.Simulation(row.spec, 2)
    for step in range(row.warm_up + 2):
        out = sim.reduce(gradients(2, step, dtype=dtype))[0]
        assert all(t.dtype == dtype and t.isfinite().all() for t in out.values())


@rows
def test_strides_do_not_matter(row):
    plain, strided = tw.Simulation(row.spec, 2), tw.Simulation(row.spec, 2)
    for step in range(row.warm_up + 2):
        inputs = gradients(2, step, {"w": (8, 24), "c": (4, 4, 3, 3)})
        views = [{"w": g["w"].mT.contiguous().mT, "c": g["c"].to(memory_format=torch.channels_last)} for g in inputs]
        assert not views[0]["w"].is_contiguous()
        out, same = plain.reduce(inputs)[0], strided.reduce(views)[0]
        assert all(torch.allclose(out[name], same[name], rtol=1e-4, atol=1e-5) for name in out)


@rows
def test_inputs_are_left_alone(row):
    sim = tw.Simulation(row.spec, 2)
    for step in range(row.warm_up + 2):
        inputs, copies = gradients(2, step), gradients(2, step)
        sim.reduce(inputs)
        assert all(equal(a, b) for a, b in zip(inputs, copies, strict=True))


@rows
def test_a_zero_gradient_is_harmless(row):
    sim = tw.Simulation(row.spec, 3)
    zeros = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 3
    for _ in range(row.warm_up + 3):
        out = sim.reduce(zeros)[0]
        assert all((t == 0).all() for t in out.values())
    assert all(t.isfinite().all() for t in flat_state(sim) if isinstance(t, torch.Tensor))


@rows
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_one_bad_number_is_seen_and_does_not_outlive_its_step(row, bad):
    """All workers see it in that step's mean; afterwards all is as if the step had not been."""
    sim, spared = tw.Simulation(row.spec, 3), tw.Simulation(row.spec, 3)
    for step in range(row.warm_up + 3):
        sim.reduce(gradients(3, step))
        spared.reduce(gradients(3, step))
    poisoned = gradients(3, 50)
    for name in ("w", "c", "b", "s", "one"):
        poisoned[1][name].view(-1)[0] = bad
    outs = sim.reduce(poisoned)
    assert all(not out[name].isfinite().all() for out in outs for name in ("w", "c", "b", "s", "one"))
    spared.step += 1  # the step counts, though it left nothing
    for name in SHAPES if not sim.method.whole else ():
        if name != "tiny":
            for mine, other in zip(sim.states, spared.states, strict=True):
                assert str(mine.get(name)) == str(other.get(name))
    for step in range(60, 63):
        inputs = gradients(3, step)
        after, untouched = sim.reduce(inputs)[0], spared.reduce(inputs)[0]
        assert all(t.isfinite().all() for t in after.values())
        assert all(torch.equal(after[n], untouched[n]) for n in SHAPES if n != "tiny")


def test_exemptions_are_from_laws_that_exist():
    assert all(row.exempt.keys() <= LAWS and all(row.exempt.values()) for row in ROWS)


class FirstHalf(tw.Method):
    """Sends the first half of a vector and withholds the rest."""

    def reduce(self, x, state, ctx):
        mean, sent = torch.zeros_like(x), x.clone()
        sent[len(x) // 2 :] = 0
        mean[: len(x) // 2] = yield AllReduce(sent[: len(x) // 2].clone())
        return Reduced(mean, sent), state


def test_a_bad_number_that_is_not_sent_is_seen_too():
    sim = tw.Simulation(tw.error_feedback(FirstHalf()), 2)
    good, bad = torch.ones(8), torch.ones(8)
    bad[7] = float("inf")
    sim.reduce([{"w": good}, {"w": good}])
    assert not sim.reduce([{"w": good}, {"w": bad}])[0]["w"].isfinite().all()
    assert torch.equal(sim.owed()["w"], torch.tensor([0.0] * 4 + [1.0] * 4))


@rows
def test_a_parameter_without_gradient_keeps_what_it_is_owed(row):
    sim = tw.Simulation(row.spec, 2)
    shapes = {"w": (12, 20), "v": (10, 10)}
    for step in range(row.warm_up + 3):
        sim.reduce(gradients(2, step, shapes))
    owed = sim.owed()["w"].clone()
    rest = [{"v": g["v"]} for g in gradients(2, 99, shapes)]
    out = sim.reduce(rest)[0]
    if sim.method.whole:  # one vector: the absent part is a zero like any other, and its debt may be paid
        assert out.keys() == shapes.keys()
    else:
        assert out.keys() == {"v"}
        assert torch.equal(sim.owed()["w"], owed)


@pytest.mark.parametrize("row", [row for row in ROWS if not tw.method(row.spec).whole], ids=str)
def test_order_and_company_of_tensors_do_not_matter(row):
    """A bucket's cut decides which tensors travel together, never what they become.

    A method over the whole gradient has one vector for a bucket, in the model's order.
    """
    together, apart = tw.Simulation(row.spec, 2), tw.Simulation(row.spec, 2)
    alone = {name: tw.Simulation(row.spec, 2) for name in SHAPES}
    for step in range(row.warm_up + 3):
        inputs = gradients(2, step)
        out = together.reduce(inputs)[0]
        backwards = apart.reduce([dict(reversed(g.items())) for g in inputs])[0]
        assert all(torch.equal(out[name], backwards[name]) for name in SHAPES)
        for name, sim in alone.items():
            assert torch.equal(out[name], sim.reduce([{name: g[name]} for g in inputs])[0][name])


@rows
@pytest.mark.parametrize("world", [1, 4])
def test_it_converges_on_a_quadratic(row, world):
    """f_i(x) = |x - a_i|^2 / 2: the mean of the a_i is reached, though no worker wants to go there."""
    targets = gradients(world, 3, {"w": (16, 16)})
    best = mean(targets, "w").float()
    sim, x = tw.Simulation(row.spec, world), torch.zeros(16, 16)
    for step in range(row.quadratic_steps):
        lr = 0.2 * (1 - row.momentum) / (1 + step / 30)
        x = x - lr * sim.reduce([{"w": x - t["w"]} for t in targets], lr=lr)[0]["w"]
    assert (x - best).norm() < 0.05 * best.norm()


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("acpp", ["acpp", "'acp'"]),
        ("acp:rnk=4", ["rnk", "'rank'", "after"]),
        ("acp:rank=0", ["rank", "at least 1"]),
        ("acp:rank=four", ["rank", "four", "int"]),
        ("acp:rank", ["key=value"]),
        ("acp:rank=1,rank=2", ["rank", "twice"]),
        ("acp:after=-1", ["after", "at least 0"]),
        ("acp:min_saving=-2", ["min_saving"]),
        ("dist-ef:momentum=1", ["momentum", "[0, 1)"]),
        ("dist-ef:max_ratio=0.5", ["max_ratio"]),
        ("dist-ef:min_size=5", ["min_size", "whole"]),
        ("dense:rank=4", ["rank"]),
        ("", ["unknown method"]),
    ],
)
def test_a_bad_spec_names_what_is_wrong(spec, named):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        tw.method(spec)
    assert all(word in str(error.value) for word in named), str(error.value)


def test_no_workers_is_an_error():
    with pytest.raises(ValueError, match="at least 1"):
        tw.Simulation("dense", 0)
    with pytest.raises(ValueError, match="at least 1"):
        tw.price("dense", {"w": (2,)}, 0)
