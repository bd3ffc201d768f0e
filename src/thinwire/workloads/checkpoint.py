"""Checkpoints of a whole run: a folder for each saved step, a file for each rank, one word for which is the latest."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LATEST = "latest"


def save(folder: Path, step: int, content: dict[str, Any]) -> None:
    """Every rank calls this. A kill at any moment leaves the previous checkpoint whole."""
    target = folder / f"step-{step:08d}"
    target.mkdir(parents=True, exist_ok=True)
    torch.save(content, target / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        note = folder / f".{LATEST}"
        note.write_text(f"{target.name} {dist.get_world_size()}\n")
        note.replace(folder / LATEST)
        for old in sorted(folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def load(folder: Path, rank: int) -> tuple[dict[str, Any], list[Path]]:
    """This rank's content of the latest checkpoint (rank 0's, where it has none), and the files of all ranks."""
    try:
        name, world = (folder / LATEST).read_text().split()
        files = [folder / name / f"rank-{r}.pt" for r in range(int(world))]
    except (OSError, ValueError) as error:
        raise ValueError(f"no checkpoint in {folder}: {error}") from None
    return read(files[rank if rank < len(files) else 0]), files


def read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"cannot read checkpoint {path}: {reason}") from None
    if not isinstance(content, dict):
        raise ValueError(f"cannot read checkpoint {path}: it holds no run")
    return content
