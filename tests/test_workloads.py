"""Laws of the workloads."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from thinwire.workloads import Workload, glyphs, load
from thinwire.workloads.image_files import read_images
from thinwire.workloads.text import stdlib_source
from thinwire.workloads.training import lately

LM = "lm:layers=1,width=32,head=16,context=16,batch=8"
IMAGE = "image:width=4,batch=16"
MLP = "mlp:layers=2,width=24,batch=16"
SMALL = [LM, IMAGE, MLP]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small() -> dict[str, Workload]:
    return {spec: load(spec, None, seed=0) for spec in SMALL}


def parameters(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def loss_at(workload: Workload, step: int, rank: int) -> float:
    return workload.loss(workload.model, step, rank, 2).item()


def train(workload: Workload, steps: int, lr: float) -> list[float]:
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = workload.loss(workload.model, step, 0, 1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("spec", SMALL)
def test_seed_decides_model_and_batches(spec: str) -> None:
    state = torch.get_rng_state()
    first, again, other = load(spec, None, 3), load(spec, None, 3), load(spec, None, 4)
    assert torch.equal(torch.get_rng_state(), state), "loading must not disturb the global random state"
    assert torch.equal(parameters(first.model), parameters(again.model))
    assert not torch.equal(parameters(first.model), parameters(other.model))
    assert loss_at(first, 5, 1) == loss_at(again, 5, 1)
    assert first.loss(first.model, 5, 1, 2) != other.loss(first.model, 5, 1, 2)


@pytest.mark.parametrize("spec", SMALL)
def test_batches_differ_by_step_and_rank_but_not_by_history(spec: str, small: dict[str, Workload]) -> None:
    workload = small[spec]
    grid = [(step, rank) for step in range(4) for rank in range(4)]
    losses = [loss_at(workload, *place) for place in grid]
    assert len(set(losses)) == len(grid)
    assert [loss_at(workload, *place) for place in reversed(grid)] == losses[::-1]


def test_default_lm_size_and_untrained_loss() -> None:
    workload = load("lm", None, 0)
    assert 7.0e6 < parameters(workload.model).numel() < 7.5e6
    assert loss_at(workload, 0, 0) == pytest.approx(math.log(256), abs=0.3)


def test_default_image_size() -> None:
    assert 2.0e5 < parameters(load("image", None, 0).model).numel() < 3.2e5


def test_mlp_has_the_layers_and_widths_asked_for(small: dict[str, Workload]) -> None:
    shapes = [tuple(p.shape) for p in small[MLP].model.parameters() if p.dim() == 2]
    assert shapes == [(24, 28 * 28), (24, 24), (10, 24)]


def test_lm_is_causal(small: dict[str, Workload]) -> None:
    model = small[LM].model
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9] = 200
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@pytest.mark.parametrize(("spec", "steps"), [(LM, 150), ("image:width=8,batch=32", 120), ("mlp:width=64", 120)])
def test_learns(spec: str, steps: int) -> None:
    workload = load(spec, None, 0)
    before = workload.evaluate(workload.model)["val_loss"]
    losses = train(workload, steps, lr=1e-2)
    assert sum(losses[-20:]) / 20 < 0.6 * losses[0]
    assert workload.evaluate(workload.model)["val_loss"] < before


@pytest.mark.parametrize("spec", SMALL)
@pytest.mark.parametrize("training", [True, False])
def test_evaluate_is_deterministic_and_leaves_no_trace(spec: str, training: bool, small: dict[str, Workload]) -> None:
    workload = small[spec]
    model = workload.model.train(training)
    frozen = next(model.children()).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    figures = workload.evaluate(model)
    assert figures == workload.evaluate(model)
    assert model.training is training and not frozen.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert math.isfinite(figures["val_loss"])
    assert set(figures) == ({"val_loss"} if spec == LM else {"val_loss", "val_accuracy"})
    model.train()


def test_evaluate_restores_mode_after_an_error(small: dict[str, Workload]) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    model = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        small[LM].evaluate(model)
    assert model.training and torch.is_grad_enabled()


def test_own_data_is_the_same_each_time() -> None:
    assert stdlib_source() == stdlib_source()
    assert 1e6 < len(stdlib_source()) <= 4e6
    images, labels = glyphs.draw(500, 7)
    again = glyphs.draw(500, 7)
    assert torch.equal(images, again[0]) and torch.equal(labels, again[1])
    assert images.shape == (500, 1, 28, 28) and images.dtype == torch.uint8
    assert set(labels.tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lmm", "Did you mean 'lm'"),
        ("lm:layer=2", "Did you mean 'layers'"),
        ("lm:layers=0", "layers=0 is out of range: 1 to"),
        ("lm:layers=x", "layers='x'"),
        ("lm:width=100", "width=100 is not a multiple of head=64"),
        ("lm:head=0", "head=0 is out of range: 8 to"),
        ("lm:context=1", "context=1 is out of range: 8 to"),
        ("lm:batch=0", "batch=0 is out of range: 1 to"),
        ("image:width=0", "width=0 is out of range: 1 to"),
        ("image:blocks=0", "blocks=0 is out of range: 1 to"),
        ("image:batch=1", "batch=1 is out of range: 2 to"),
        ("mlp:layers=0", "layers=0 is out of range: 1 to"),
        ("mlp:width=0", "width=0 is out of range: 1 to"),
        ("mlp:batch=0", "batch=0 is out of range: 1 to"),
    ],
)
def test_bad_options(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(spec, None, 0)


def test_bad_seed() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        load(LM, None, -1)


def test_lm_reads_a_file_and_validates_on_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    workload = load(LM, path, 0)
    train(workload, 30, 1e-2)
    assert loss_at(workload, 99, 0) < 1
    assert workload.evaluate(workload.model)["val_loss"] > 4


def test_bad_text(tmp_path: Path) -> None:
    empty, short, exact = tmp_path / "empty", tmp_path / "short", tmp_path / "exact"
    empty.touch()
    short.write_bytes(b"x" * 169)
    exact.write_bytes(b"x" * 170)
    cases = {tmp_path / "none": "none does not exist", tmp_path: "is a directory", empty: "empty is empty"}
    for path, message in {**cases, short: "has 169 bytes: lm with context=16 needs 170"}.items():
        with pytest.raises(ValueError, match=message) as caught:
            load(LM, path, 0)
        assert "\n" not in str(caught.value)
    workload = load(LM, exact, 0)
    assert math.isfinite(loss_at(workload, 0, 0) + workload.evaluate(workload.model)["val_loss"])


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, zipped: bool = True) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in {"train": 30, "t10k": 20}.items():
        arrays[f"{part}-images-idx3-ubyte"] = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = random.integers(0, 10, count, dtype=np.uint8)
    for name, array in arrays.items():
        raw = idx(array)
        (folder / f"{name}.gz").write_bytes(gzip.compress(raw)) if zipped else (folder / name).write_bytes(raw)
    return arrays


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist(tmp_path: Path, zipped: bool) -> None:
    arrays = write_mnist(tmp_path, zipped)
    (images, labels), (test_images, test_labels) = read_images(tmp_path)
    assert np.array_equal(images[:, 0].numpy(), arrays["train-images-idx3-ubyte"])
    assert np.array_equal(labels.numpy(), arrays["train-labels-idx1-ubyte"])
    assert test_images.shape == (20, 1, 28, 28)
    assert np.array_equal(test_labels.numpy(), arrays["t10k-labels-idx1-ubyte"])
    workload = load(IMAGE, tmp_path, 0)
    assert math.isfinite(loss_at(workload, 0, 0))
    assert 0 <= workload.evaluate(workload.model)["val_accuracy"] <= 1


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / inside
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for number, name in enumerate(names):
        pixels = random.integers(0, 256, (4, 3072), dtype=np.uint8)
        rows = np.concatenate([np.full((4, 1), number, np.uint8), pixels], axis=1)
        (folder / name).write_bytes(rows.tobytes())
    (images, labels), (test_images, test_labels) = read_images(tmp_path)
    assert images.shape == (20, 3, 32, 32) and test_images.shape == (4, 3, 32, 32)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    assert test_labels.tolist() == [5] * 4
    # The file stores a red, a green and a blue plane, row by row.
    assert test_images[-1, 2, 31, 31] == pixels[-1, -1] and test_images[-1, 1, 0, 0] == pixels[-1, 1024]
    workload = load(IMAGE, tmp_path, 0)
    assert math.isfinite(loss_at(workload, 0, 0))

    (folder / "test_batch.bin").write_bytes(b"\0" * 3000)
    with pytest.raises(ValueError, match=r"test_batch\.bin is truncated: 3000 bytes"):
        load(IMAGE, tmp_path, 0)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"missing in .*: data_batch_3\.bin$"):
        load(IMAGE, tmp_path, 0)


def test_bad_image_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    cases = {
        tmp_path / "none": "none does not exist",
        file: "is not a directory",
        tmp_path: "no images in .*train-images-idx3-ubyte.*data_batch_1.bin",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load(IMAGE, path, 0)


GOOD = idx(np.zeros((30, 28, 28), np.uint8))
IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (IMAGES, None, r"missing in .*: train-images-idx3-ubyte$"),
        (IMAGES, b"plain", "is not an intact gzip file"),
        (IMAGES, b"", "is not an idx file: it begins with nothing"),
        (IMAGES, gzip.compress(GOOD, mtime=0)[:40], "is not an intact gzip file"),
        (IMAGES, gzip.compress(GOOD, mtime=0)[:12] + b"\xff" * 30, "is not an intact gzip file"),
        (
            IMAGES,
            gzip.compress(b"\1" + GOOD[1:], mtime=0),
            "is not an idx file: it begins with 01000803, not 00000803",
        ),
        (IMAGES, gzip.compress(GOOD[:9], mtime=0), "is truncated: its header has 9 of 16 bytes"),
        (IMAGES, gzip.compress(GOOD[:-1], mtime=0), "is truncated or damaged: 23519 bytes of data, not 23520"),
        (IMAGES, gzip.compress(idx(np.zeros((29, 28, 28), np.uint8)), mtime=0), "has 29 images but .* 30 labels"),
        (LABELS, gzip.compress(idx(np.full(30, 10, np.uint8)), mtime=0), "has label 10: expected 0 to 9"),
    ],
)
def test_damaged_mnist(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load(IMAGE, tmp_path, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("steps", [6, 7, 8, 9])
def test_bytes_lately_are_the_mean_of_both_turns_of_a_method_that_alternates(period: int, steps: int) -> None:
    turns = [10, 30]
    sent = [0 if step % period else turns[step // period % 2] for step in range(steps * period)]
    running = [0, *np.cumsum([1000, *sent]).tolist()]
    assert lately(running, period) == sum(turns) // (2 * period)
