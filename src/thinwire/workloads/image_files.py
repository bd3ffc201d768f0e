"""Readers of MNIST (idx) and CIFAR-10 (binary version) files."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.workloads.common import read_bytes

Bytes = npt.NDArray[np.uint8]
Labelled = tuple[Tensor, Tensor]

MNIST_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
MNIST_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = ("test_batch.bin",)
CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_SHAPE = (3, 32, 32)


def read_images(folder: Path) -> tuple[Labelled, Labelled]:
    """The training and the test set: uint8 images (count, channels, height, width) with their labels."""
    if not folder.exists():
        raise ValueError(f"data directory {folder} does not exist")
    if not folder.is_dir():
        raise ValueError(f"data {folder} is not a directory: the image workload reads a directory")
    for place in (folder, folder / CIFAR_FOLDER):
        if any((place / name).exists() for name in CIFAR_TRAIN + CIFAR_TEST):
            _check_complete(place, [name for name in CIFAR_TRAIN + CIFAR_TEST if not (place / name).exists()])
            return _read_cifar(place, CIFAR_TRAIN), _read_cifar(place, CIFAR_TEST)
    missing = [name for name in MNIST_TRAIN + MNIST_TEST if _find(folder, name) is None]
    if len(missing) == len(MNIST_TRAIN + MNIST_TEST):
        raise ValueError(
            f"no images in {folder}: expected MNIST ({', '.join(missing)}, each with or without .gz)"
            f" or CIFAR-10 ({', '.join(CIFAR_TRAIN + CIFAR_TEST)})"
        )
    _check_complete(folder, missing)
    return _read_mnist(folder, *MNIST_TRAIN), _read_mnist(folder, *MNIST_TEST)


def _check_complete(folder: Path, missing: list[str]) -> None:
    if missing:
        raise ValueError(f"missing in {folder}: {', '.join(missing)}")


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.gz", folder / name) if path.exists()), None)


def _read_mnist(folder: Path, images: str, labels: str) -> Labelled:
    pixels, classes = _read_idx(folder, images, 3), _read_idx(folder, labels, 1)
    if len(pixels) != len(classes):
        raise ValueError(f"{folder}: {images} has {len(pixels)} images but {labels} {len(classes)} labels")
    return _labelled(folder / labels, pixels[:, None], classes)


def _read_idx(folder: Path, name: str, dimensions: int) -> Bytes:
    path = _find(folder, name)
    assert path is not None
    raw = read_bytes(path)
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not an intact gzip file: {error}") from error
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each dimension in four bytes.
    magic = bytes([0, 0, 8, dimensions])
    if raw[:4] != magic:
        start = raw[:4].hex() or "nothing"
        raise ValueError(f"{path} is not an idx file: it begins with {start}, not {magic.hex()}")
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise ValueError(f"{path} is truncated: its header has {len(raw)} of {header} bytes")
    shape = np.frombuffer(raw, ">u4", dimensions, 4).astype(np.int64)
    body = np.frombuffer(raw, np.uint8, offset=header)
    if body.size != shape.prod():
        raise ValueError(f"{path} is truncated or damaged: {body.size} bytes of data, not {shape.prod()}")
    return body.reshape(shape)


def _read_cifar(folder: Path, names: tuple[str, ...]) -> Labelled:
    record = 1 + int(np.prod(CIFAR_SHAPE))
    batches = []
    for name in names:
        raw = np.frombuffer(read_bytes(folder / name), np.uint8)
        if not raw.size or raw.size % record:
            raise ValueError(f"{folder / name} is truncated: {raw.size} bytes is no multiple of {record}")
        batches.append(raw.reshape(-1, record))
    rows = np.concatenate(batches)
    return _labelled(folder, rows[:, 1:].reshape(-1, *CIFAR_SHAPE), rows[:, 0])


def _labelled(source: Path, pixels: Bytes, classes: Bytes) -> Labelled:
    if not pixels.size:
        raise ValueError(f"{source} holds no images")
    if classes.max() > 9:
        raise ValueError(f"{source} has label {classes.max()}: expected 0 to 9")
    # Copied, since torch wants memory that it may write to.
    return torch.from_numpy(pixels.copy()), torch.from_numpy(classes.astype(np.int64))
