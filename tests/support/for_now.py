"""Temporary folders. The process that made a folder removes it at the end of the process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def folder_for_now(name: str, beside: Path | None = None) -> Path:
    """Return a new temporary folder inside `beside`, or in the system's folder for temporary files."""
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    path, mine = tempfile.mkdtemp(prefix=f"teraio-{name}-", dir=beside), os.getpid()

    def remove() -> None:
        if os.getpid() == mine:  # a forked child must not remove the folder
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return Path(path)
