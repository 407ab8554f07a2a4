"""Folders that go with the process that made them."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def folder_for_now(name: str, beside: Path | None = None) -> Path:
    """In `beside`, which is made if need be, or where the system has such."""
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    path, mine = tempfile.mkdtemp(prefix=f"teraio-{name}-", dir=beside), os.getpid()

    def remove() -> None:
        if os.getpid() == mine:  # not a forked child
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return Path(path)
