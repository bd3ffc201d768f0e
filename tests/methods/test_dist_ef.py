from __future__ import annotations

import copy
import math

import pytest
import torch

import thinwire as tw
from thinwire.methods.signs import ScaledSign

torch.set_num_threads(1)

SHAPES = {"w": (6, 11), "conv": (5, 2, 3, 3), "b": (17,)}
EVERY_TENSOR = "dist-ef-block:min_saving=0,min_dims=0"
BLOCK = f"{EVERY_TENSOR},relaxation=1"
SCHEDULES = {
    "constant": [0.1] * 30,
    "step decay": [0.1] * 12 + [0.01] * 10 + [0.001] * 8,
    "warm-up": [0.1 * (t + 1) / 20 for t in range(20)] + [0.1] * 10,
    "zero at first": [0.0] * 4 + [0.05 * t for t in range(1, 27)],
    "zero in between": [0.1] * 8 + [0.0] * 3 + [0.02] * 8 + [0.0] + [0.06] * 10,
}


def scaled_sign(x: torch.Tensor, relaxation: float = 1.0) -> torch.Tensor:
    sign = torch.tensor([1.0 if value >= 0 else -1.0 for value in x.tolist()], dtype=x.dtype)
    return min(relaxation, 1 / share(x)) * x.abs().sum() / max(1, len(x)) * sign


def share(x: torch.Tensor) -> float:
    """delta: how much of x lies along its signs."""
    return (x.abs().sum() ** 2 / (len(x) * x.square().sum())).item() if x.any() else 1.0


class Paper:
    """Algorithm 2 of arXiv 1905.10936 for one block and all workers, in float64.

    The server of chunk j is worker j, and a chunk has a scale of its own: the first chunks have ceil(d/W) elements.
    """

    def __init__(self, d: int, workers: int, relaxation: float = 1.0) -> None:
        self.relaxation = relaxation
        self.e = [torch.zeros(d, dtype=torch.float64) for _ in range(workers)]
        self.server_e = torch.zeros(d, dtype=torch.float64)
        step = math.ceil(d / workers)
        self.chunks = [slice(min(d, j * step), min(d, (j + 1) * step)) for j in range(workers)]

    def compressed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([scaled_sign(x[chunk], self.relaxation) for chunk in self.chunks])

    def step(self, inputs: list[torch.Tensor], ratio: float = 1.0) -> torch.Tensor:
        p = [x.flatten() + ratio * e for x, e in zip(inputs, self.e, strict=True)]
        pushed = [self.compressed(x) for x in p]
        self.e = [x - D for x, D in zip(p, pushed, strict=True)]
        a = sum(pushed) / len(pushed) + ratio * self.server_e
        pulled = self.compressed(a)
        self.server_e = a - pulled
        return pulled.view(inputs[0].shape)

    def owed(self) -> torch.Tensor:
        return sum(self.e) / len(self.e) + self.server_e


def gradients(workers, step, shapes=SHAPES):
    g = torch.Generator().manual_seed(step)
    return [{n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in shapes.items()} for _ in range(workers)]


def mean_of(inputs, name):
    return torch.stack([x[name] for x in inputs]).mean(0)


def joined(tensors):
    return torch.cat([x.flatten() for x in tensors.values()])


def errors(sim, name):
    """The workers' errors and the server's, read from a momentum-free method's states."""
    states = [s[name] for s in sim.states]
    return [s.error.flatten() for s in states], torch.cat([s.inner.server_error for s in states])


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("relaxation", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_each_tensor_is_a_block_of_the_papers(workers, relaxation):
    sim = tw.Simulation(f"{EVERY_TENSOR},relaxation={relaxation}", workers)
    paper = {name: Paper(math.prod(shape), workers, relaxation) for name, shape in SHAPES.items()}
    last = None
    for step, lr in enumerate([0.1, 0.1, 0.05, 0.2, 0.02, 0.02]):
        inputs, ratio = gradients(workers, step), last / lr if last else 1.0
        outs = sim.reduce(inputs, lr=lr)
        for name in SHAPES:
            wanted = paper[name].step([x[name] for x in inputs], ratio)
            assert all(torch.equal(outs[0][name], out[name]) for out in outs)
            close(outs[0][name], wanted)
            e, server_e = errors(sim, name)
            close(torch.stack(e), torch.stack(paper[name].e))
            close(server_e, paper[name].server_e)
        last = lr


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_whole_gradient_is_one_block_of_the_papers(workers):
    sim = tw.Simulation("dist-ef", workers)
    paper = Paper(sum(math.prod(shape) for shape in SHAPES.values()), workers)
    for step in range(6):
        inputs = gradients(workers, step)
        out = sim.reduce(inputs, lr=0.1)[0]
        close(joined(out), paper.step([joined(x) for x in inputs]))
        e, server_e = errors(sim, "")
        close(torch.stack(e), torch.stack(paper.e))
        close(server_e, paper.server_e)


@pytest.mark.parametrize("method", ["dist-ef", BLOCK])
def test_momentum_is_nesterovs_on_each_worker_before_compression(method):
    mu, workers = 0.9, 3
    separator = "," if ":" in method else ":"
    sim = tw.Simulation(f"{method}{separator}momentum={mu}", workers)
    shapes = {"w": (50,)}
    paper, m = Paper(50, workers), [torch.zeros(50, dtype=torch.float64) for _ in range(workers)]
    for step in range(8):
        inputs = gradients(workers, step, shapes)
        m = [mu * m_i + x["w"] for m_i, x in zip(m, inputs, strict=True)]
        nesterov = [mu * m_i + x["w"] for m_i, x in zip(m, inputs, strict=True)]
        close(sim.reduce(inputs)[0]["w"], paper.step(nesterov))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", ["dist-ef:", "dist-ef-block:min_dims=0,"])
def test_parameters_less_what_is_owed_follow_uncompressed_sgd(method, schedule, momentum):
    workers, rates = 3, SCHEDULES[schedule]
    sim = tw.Simulation(f"{method}momentum={momentum},max_ratio=100", workers)
    x = {name: torch.randn(shape, dtype=torch.float64, generator=seeded(0)) for name, shape in SHAPES.items()}
    y = {name: value.clone().requires_grad_() for name, value in x.items()}
    plain = torch.optim.SGD(y.values(), lr=1.0, momentum=momentum, nesterov=momentum > 0)
    last = 0.0
    for step, lr in enumerate(rates):
        # gradients at the compressed run's parameters, so that errors matter
        inputs = [{n: 0.5 * x[n] + g[n] for n in SHAPES} for g in gradients(workers, step)]
        out = sim.reduce(inputs, lr=lr)[0]
        for name in SHAPES:
            x[name] = x[name] - lr * out[name]
            y[name].grad = mean_of(inputs, name)
        plain.param_groups[0]["lr"] = lr
        plain.step()
        last = lr or last
        for name, owed in sim.owed().items():
            close(x[name] - last * owed, y[name].detach(), 1e-12)
            if lr:
                assert (last * owed).abs().max() > 1e-5  # the law is not about nothing


@pytest.mark.parametrize("method", ["dist-ef", BLOCK])
def test_what_is_owed_is_the_mean_of_the_workers_errors_and_the_servers(method):
    sim = tw.Simulation(method, 3)
    for step in range(3):
        sim.reduce(gradients(3, step, {"w": (20,)}))
        e, server_e = errors(sim, "" if method == "dist-ef" else "w")
        close(sim.owed()["w"], sum(e) / 3 + server_e, 1e-15)


@pytest.mark.parametrize("max_ratio", [1.0, 10.0, 1000.0])
def test_errors_grow_with_a_falling_rate_up_to_the_bound(max_ratio):
    sim, paper = tw.Simulation(f"{BLOCK},max_ratio={max_ratio}", 3), Paper(40, 3)
    last = None
    for step, lr in enumerate([1.0, 1.0, 0.5, 0.005, 0.005, 0.5]):
        inputs = gradients(3, step, {"w": (40,)})
        ratio = min(last / lr, max_ratio) if last else 1.0
        close(sim.reduce(inputs, lr=lr)[0]["w"], paper.step([x["w"] for x in inputs], ratio))
        last = lr


@pytest.mark.parametrize("method", ["dist-ef", "dist-ef-block"])
def test_the_default_bound_is_ten(method):
    after_fall = []
    for spec in (method, f"{method}:max_ratio=10", f"{method}:max_ratio=100"):
        sim = tw.Simulation(spec, 2)
        sim.reduce(gradients(2, 0), lr=1.0)
        after_fall.append(joined(sim.reduce(gradients(2, 1), lr=0.01)[0]))
    assert torch.equal(after_fall[0], after_fall[1])
    assert not torch.allclose(after_fall[0], after_fall[2])


def test_a_step_with_rate_zero_leaves_the_errors_alone_but_not_the_momentum():
    sim = tw.Simulation(f"{BLOCK},momentum=0.9", 2)
    sim.reduce(gradients(2, 0), lr=0.1)
    before = copy.deepcopy(sim.states)
    sim.reduce(gradients(2, 1), lr=0.0)
    for old, new in zip(before, sim.states, strict=True):
        for name in SHAPES:
            assert torch.equal(old[name].inner.error, new[name].inner.error)
            assert torch.equal(old[name].inner.inner.server_error, new[name].inner.inner.server_error)
            assert not torch.equal(old[name].momentum, new[name].momentum)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("d", [1, 2, 4, 5, 6, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("method", ["dist-ef", BLOCK])
def test_mass_is_conserved_in_every_chunk_of_any_size(method, d, workers):
    sim, paper = tw.Simulation(method, workers), Paper(d, workers)
    owed = torch.zeros(d, dtype=torch.float64)
    for step in range(4):
        inputs = gradients(workers, step, {"w": (d,)})
        out = sim.reduce(inputs)[0]["w"]
        close(mean_of(inputs, "w") + owed, out + sim.owed()["w"], 1e-13)
        close(out, paper.step([x["w"] for x in inputs]))
        owed = sim.owed()["w"]


@pytest.mark.parametrize("relaxation", [0.5, 1.0, 1.5, 1.99])
@pytest.mark.parametrize("d", [1, 2, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("shape", ["gaussian", "sparse", "flat", "heavy"])
def test_the_compressor_contracts_by_what_the_paper_proves_with(d, shape, relaxation):
    x = torch.randn(d, dtype=torch.float64, generator=seeded(d))
    x = {"gaussian": x, "sparse": x * (torch.arange(d) % 50 == 0), "flat": x.sign(), "heavy": x**5}[shape]
    compressed = torch.empty_like(x)
    signs = ScaledSign(relaxation=relaxation)
    signs.decode([(signs.encode([(x, 1, d)])[0], d, compressed)])
    delta = share(x)
    assert delta >= (1 - 1e-12) / d
    omega = min(relaxation, 1 / delta)
    close((x - compressed).square().sum(), (1 - omega * (2 - omega) * delta) * x.square().sum(), 1e-12)
    close(x @ compressed, omega * delta * x.square().sum(), 1e-12)
    close(compressed, scaled_sign(x, relaxation), 1e-12)


def lag(method: str, tail: int) -> float:
    """How many steps' worth of a steady gradient waits, where noise of its own size comes with it."""
    sim, g = tw.Simulation(method, 4), seeded(tail)
    scale = torch.randn(64, 64, generator=g).abs() ** tail
    steady, waiting = torch.randn(64, 64, generator=g) * scale, []
    for _ in range(100):
        sim.reduce([{"w": steady + torch.randn(64, 64, generator=g) * scale} for _ in range(4)])
        waiting.append((sim.owed()["w"] * steady).sum() / steady.square().sum())
    return torch.stack(waiting[50:]).mean().item()


@pytest.mark.parametrize("tail", [0, 1, 2])
def test_relaxed_scales_shorten_the_lag(tail):
    paper, relaxed = lag("dist-ef-block:relaxation=1", tail), lag("dist-ef-block", tail)
    assert 0 < relaxed < 0.7 * paper
    assert paper > 3


def test_zero_and_negative_zero_are_plus_on_the_wire():
    x = torch.tensor([0.0, -0.0, 3.0, -1.0, 0.0, -0.0])
    (signs,) = ScaledSign().encode([(x, 1, 6)])
    assert signs.bits.tolist() == [[0b110111]]
    scale = signs.scale.item()
    assert scale == pytest.approx(4 / 6)
    ScaledSign().decode([(signs, 6, x)])
    assert x.tolist() == [scale, scale, scale, -scale, scale, scale]


def test_zero_gradients_stay_zero():
    sim = tw.Simulation("dist-ef", 3)
    for _ in range(3):
        assert not sim.reduce([{"w": torch.zeros(10)}] * 3)[0]["w"].any()
    assert not sim.owed()["w"].any()


@pytest.mark.parametrize("real", [1, 5, 8, 11])
def test_padding_takes_no_part_in_the_scale(real):
    x = torch.randn(real, dtype=torch.float64, generator=seeded(1))
    vector = torch.cat([torch.ones(12, dtype=torch.float64), x])
    (signs,) = ScaledSign().encode([(vector, 3, 12)])
    close(signs.scale[:, 0], torch.tensor([1.0, x.abs().mean(), 0.0], dtype=torch.float64), 1e-15)
    ScaledSign().decode([(signs, 12, vector)])
    close(vector[12:], scaled_sign(x), 1e-15)


@pytest.mark.parametrize(("method", "least"), [("dist-ef", 31), ("dist-ef-block:block=0", 31), ("dist-ef-block", 30)])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_large_tensor_costs_a_thirty_second_and_its_scales(method, least, workers):
    shapes = {"w": (1024, 1024)}
    collectives = tw.price(method, shapes, workers)
    dense = sum(sent for _, sent in tw.price("dense", shapes, workers))
    assert [op for op, _ in collectives] == ["all_to_all", "all_gather"]
    assert least <= dense / sum(sent for _, sent in collectives) <= 32


def test_each_block_has_a_scale_of_its_own():
    """Blocks of equal magnitudes pass exactly, however much they differ; under one scale they would not."""
    x = torch.tensor([1.0, -1.0] * 4 + [100.0, -100.0] * 4, dtype=torch.float64)
    for block, exact in ((8, True), (0, False)):
        sim = tw.Simulation(f"{BLOCK},block={block}", 1)
        assert torch.equal(sim.reduce([{"w": x}])[0]["w"], x) is exact


@pytest.mark.parametrize("workers", [2, 3])
def test_the_simulation_sends_the_priced_bytes(workers):
    for method in ("dist-ef", "dist-ef-block"):
        sim = tw.Simulation(method, workers)
        sim.reduce([{n: x.float() for n, x in g.items()} for g in gradients(workers, 0)])
        assert sim.bytes_sent == sum(sent for _, sent in tw.price(method, SHAPES, workers))


def test_vectors_and_tiny_tensors_go_rounded_in_the_same_collectives_and_the_rounding_comes_back():
    shapes = {"w": (30, 30), "tiny": (2, 1), "bias": (100,)}
    sim, owed = tw.Simulation("dist-ef-block", 3), {"tiny": 0.0, "bias": 0.0}
    for step in range(5):
        inputs = gradients(3, step, shapes)
        out = sim.reduce(inputs)[0]
        for name in owed:
            wanted = mean_of(inputs, name) + owed[name]
            close(out[name], wanted, 0.02)
            close(out[name] + sim.owed()[name], wanted, 1e-14)
            owed[name] = sim.owed()[name]
            assert owed[name].any()
    assert [op for op, _ in tw.price("dist-ef-block", shapes, 3)] == ["all_to_all", "all_gather"]


@pytest.mark.parametrize("method", ["dist-ef", "dist-ef-block"])
@pytest.mark.parametrize("option", ["momentum=1", "momentum=-0.1", "max_ratio=0.5", "max_ratio=nan"])
def test_bad_options_are_refused_by_name(method, option):
    key = option.partition("=")[0]
    with pytest.raises(ValueError, match=f"{key} must be"):
        tw.method(f"{method}:{option}")


def seeded(seed):
    return torch.Generator().manual_seed(seed)
