"""Tests in which system calls of a store fail. After each failure, the store raises an error or uses a
fallback."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_rig import MIB

from teraio.errors import StoreError
from teraio.runtime.store import directories, files
from teraio.runtime.store.store import Store


def no_files_left(path: Any, *args: Any, **more: Any) -> int:
    raise OSError(errno.EMFILE, "Too many open files", str(path))


def vanished(path: Any, *args: Any, **more: Any) -> int:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))


def failing(*args: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("call", "answer", "why"),
    [
        ("access", lambda *_, **__: False, "it is not writable"),
        ("fstatvfs", lambda fd: SimpleNamespace(f_flag=os.ST_RDONLY), "mounted read-only"),
        ("open", no_files_left, "too many files are open.*ulimit -n"),
        ("open", vanished, "it was removed while it was being opened"),
        ("pwrite", failing, "the first block could not be written: Input/output error"),
    ],
)
def test_refused_system_call_raises_with_its_cause(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, answer: Callable[..., Any], why: str
) -> None:
    monkeypatch.setattr(os, call, answer)
    with pytest.raises(StoreError, match=why) as got:
        Store(root, MIB)
    assert str(root) in str(got.value) and got.value.path == str(root)


def test_full_disk_raises_before_a_file_is_created(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories.Directory, "free_bytes", lambda self: 0)
    with pytest.raises(StoreError, match=f"the disk is full: no bytes are free in {root}"):
        Store(root)
    assert not list(root.iterdir())


def test_file_grows_without_fallocate(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_fallocate", lambda *_: errno.EOPNOTSUPP)
    store = Store(root, 512 * MIB)
    assert [fallback for fallback in store.fallbacks if "cannot reserve space" in fallback]
    extents = [store.reserve(100 * MIB, f"t{number}") for number in range(3)]
    assert store.space.files[0].allocated_bytes >= 300 * MIB == sum(extent.size_bytes for extent in extents)
    store.close()


def test_interrupted_fallocate_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [errno.EINTR, errno.EINTR, 0, errno.ENOSPC]

    def fallocate(*_: int) -> int:
        ctypes.set_errno(answers[0])
        return -1 if answers.pop(0) else 0

    monkeypatch.setattr(files, "_LIBC", SimpleNamespace(fallocate=fallocate))
    assert [files._fallocate(3, 0, 1) for _ in range(2)] == [0, errno.ENOSPC]


def test_invalid_descriptor_has_file_system_other() -> None:
    assert directories.file_system_name(-1) == "other"


def test_file_is_closed_once_and_on_request_without_truncation(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(root, MIB)
    (file,) = store.space.files
    cut: list[int] = []
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: cut.append(fd))
    fd = file.fd
    file.close(give_back=False)
    file.close()
    assert not cut and file.fd == -1
    with pytest.raises(OSError):
        os.fstat(fd)
    store.close()
