"""Files that a command is asked to write."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: Path | None) -> None:
    """Raises ``ValueError`` while there is still time: before anything is started."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: permission denied")
