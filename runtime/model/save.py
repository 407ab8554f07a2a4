"""`teraio.save` and `teraio.load`: torch's files, a tensor at a time, and never half a file.

    bytes -> a temporary name beside the file -> fsync -> the file's name

Whatever ends the process before the last step leaves the old file as it was.
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
    """As `torch.save`: any object with tensors, in the same format. What is away comes back one by one."""
    target = Path(path)
    pickling.install()
    _remove_partial_files(target)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.{SUFFIX}")
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # as long as it is being written
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
    """As `torch.load`, with the file's bytes read when they are used: no second copy of a model in memory."""
    return torch.load(os.fspath(path), **{"map_location": "cpu", "mmap": True, **options})


def _remove_partial_files(target: Path) -> None:
    """What processes left that were killed while they saved this file. One that still saves holds a lock."""
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
