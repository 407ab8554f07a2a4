"""`teraio.save` and `teraio.load`, in torch's file format. `save` writes one tensor at a time.

    bytes -> a temporary file in the same folder -> fsync -> a rename to the name of the saved file

If the process ends before the rename, an older file with this name is unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from pathlib import Path
from typing import Any

import torch

from ..patches import pickling

SUFFIX = "partial"


def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """Save any object in the format of `torch.save`. Evicted tensors are fetched one at a time."""
    target = Path(path)
    pickling.install()
    _remove_partial_files(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.{SUFFIX}")
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # `_remove_partial_files` of another process skips a locked file
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    _sync_folder(target.parent)


def load(path: str | os.PathLike[str], **options: Any) -> Any:
    """Load a file with `torch.load`. Map the file into memory instead of reading it, so that memory never has
    a second copy of the model."""
    return torch.load(os.fspath(path), **{"map_location": "cpu", "mmap": True, **options})


def _remove_partial_files(target: Path) -> None:
    """Remove the partial files that killed processes left when they saved to `target`.

    A process that is still saving holds a lock on its partial file. A locked file is not removed.
    """
    ours = re.compile(re.escape(f".{target.name}.") + rf"[0-9a-f]{{16}}\.{SUFFIX}")
    for name in os.listdir(target.parent):
        if ours.fullmatch(name):
            with contextlib.suppress(OSError):
                descriptor = os.open(target.parent / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(target.parent / name)
                finally:
                    os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
