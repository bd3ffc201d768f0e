"""Text for the language model: a file, or the source code of the Python standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from thinwire.workloads.common import read_bytes

STDLIB_BYTES = 4_000_000
"""Enough not to be memorised by a small model, and quick to load."""

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
TABLES = {"encodings", "pydoc_data"}
"""Machine-written tables: they would make the text's statistics differ from place to place."""


def read_text(path: Path | None) -> bytes:
    return stdlib_source() if path is None else _read_file(path)


def stdlib_source() -> bytes:
    """The first bytes of the standard library's modules in the order of their paths.

    The same on every machine with the same Python release.
    """
    root = sysconfig.get_paths()["stdlib"]
    text = bytearray()
    for path in _modules(root):
        text += read_bytes(path)
        if len(text) >= STDLIB_BYTES:
            break
    if not text:
        raise ValueError(f"no Python source in {root}: give a text file as data")
    return bytes(text[:STDLIB_BYTES])


def _modules(root: str) -> Iterator[Path]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED - TABLES)
        # Build-time settings, which differ from machine to machine.
        names = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        yield from (Path(folder, name) for name in sorted(names))


def _read_file(path: Path) -> bytes:
    if not path.exists():
        raise ValueError(f"data file {path} does not exist")
    if path.is_dir():
        raise ValueError(f"data {path} is a directory: the lm workload reads one text file")
    text = read_bytes(path)
    if not text:
        raise ValueError(f"data file {path} is empty")
    return text
