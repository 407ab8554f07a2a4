"""Tests of a store's capacity, and of the errors that a store raises for lack of space.

The errors occur (1) at the start, (2) during a run, or (3) because of a limit of the process.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_rig import MIB, Memory, churn

from teraio import _native
from teraio.errors import StoreError, StoreFullError
from teraio.runtime.store import files
from teraio.runtime.store.space import Extent
from teraio.runtime.store.store import Store


def test_store_larger_than_the_disk_is_refused_before_its_creation(root: Path) -> None:
    with pytest.raises(StoreFullError, match=r"store_size is 4 PiB, but .* are free in .*store_size"):
        Store([root, root], 1 << 52)
    assert not list(root.iterdir())


def test_size_may_be_a_function_of_free_bytes(root: Path) -> None:
    received: list[int] = []

    def eighth(free_bytes: int) -> int:
        received.append(free_bytes)
        return 8 * MIB

    store = Store([root, root], eighth)
    assert store.capacity_bytes == 8 * MIB
    assert abs(received[0] - shutil.disk_usage(root).free) < (1 << 30), "one disk is counted once"
    store.close()


class Tight:
    """A device that can allocate at most 4 MiB for transfer buffers (slabs)."""

    copier = None

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        if slab_bytes * count > 4 * MIB:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return _native.Slabs(slab_bytes, count)


class Broken(Tight):
    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_slabs_shrink_with_a_warning_if_memory_is_short(root: Path) -> None:
    store = Store(root, 16 * MIB, device=Tight())
    assert store.slab_bytes_total == 4 * MIB
    assert len(store.fallbacks) == 2 and "4 MiB instead of 8 MiB" in store.fallbacks[1]
    churn(store, 3)
    store.close()
    with pytest.raises(StoreError, match="no memory for"):
        Store(root, 16 * MIB, device=Broken())
    assert not list(root.iterdir())


def test_two_directories_on_one_disk_share_its_free_bytes(root: Path) -> None:
    store = Store([root, root])
    assert store.capacity_bytes <= shutil.disk_usage(root).free * 0.96
    store.close()


def test_failed_fallocate_frees_its_blocks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fallocate, ext4 keeps the blocks that it has already allocated. The store frees these
    blocks by truncating the file."""

    def half(fd: int, offset: int, size_bytes: int) -> int:
        if offset + size_bytes <= 4 * MIB:
            return really(fd, offset, size_bytes)
        really(fd, offset, size_bytes // 2)
        return errno.ENOSPC

    really = files._fallocate
    monkeypatch.setattr(files, "FIRST_BYTES", MIB)
    monkeypatch.setattr(files, "_fallocate", half)
    store = Store(root, 64 * MIB)
    kept = store.reserve(3 * MIB, "kept")
    fd = store.space.files[0].fd
    before = (os.fstat(fd).st_size, os.fstat(fd).st_blocks)
    with pytest.raises(StoreFullError, match=r"'big'.*cannot grow") as got:
        store.reserve(32 * MIB, "big")
    assert got.value.errno == errno.ENOSPC and got.value.tensor == "big"
    about = os.fstat(fd)
    assert about.st_size == store.space.files[0].allocated_bytes
    assert about.st_blocks * 512 <= 4 * MIB + 65536 and about.st_size >= before[0]
    memory = Memory(3 * MIB, seed=1)
    store.write(kept, memory.address, "kept").wait()
    monkeypatch.setattr(files, "_fallocate", really)
    store.release(store.reserve(32 * MIB, "big"))
    store.close()


def test_unreachable_disk_is_named_and_store_can_be_closed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(root, 256 * MIB)
    system_close, closed = os.close, list[int]()

    def unreachable(*_: object) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    def close(fd: int) -> None:
        system_close(fd)
        closed.append(fd)
        unreachable()

    monkeypatch.setattr(os, "fstatvfs", unreachable)
    with pytest.raises(StoreError, match=r"cannot grow by .*: Transport endpoint is not connected"):
        store.reserve(200 * MIB, "large")
    monkeypatch.setattr(os, "close", close)
    store.close()
    assert len(closed) >= 2, "the file, and its directory"


def test_other_disks_take_the_part_of_a_disk_that_cannot_grow(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store([root, root], 256 * MIB)
    full = store.space.files[0].fd
    really = files._fallocate
    monkeypatch.setattr(files, "_fallocate", lambda fd, *a: errno.ENOSPC if fd == full else really(fd, *a))
    extent = store.reserve(200 * MIB, "t")
    by_file = [sum(size for file, _, size in extent.pieces if file == number) for number in (0, 1)]
    assert by_file[0] <= files.FIRST_BYTES and sum(by_file) == 200 * MIB
    monkeypatch.undo()
    store.close()


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    old = resource.getrlimit(what)
    resource.setrlimit(what, (soft, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, old)


def test_a_file_size_limit_is_named(root: Path) -> None:
    with limited(resource.RLIMIT_FSIZE, 2 * MIB):
        store = Store(root, 64 * MIB)
        store.reserve(MIB, "small")
        with pytest.raises(StoreFullError, match="ulimit -f"):
            store.reserve(16 * MIB, "t")
        store.close()


def test_too_few_file_descriptors_are_named(root: Path) -> None:
    gc.collect()
    used = len(os.listdir("/proc/self/fd"))
    for more in range(8):
        with limited(resource.RLIMIT_NOFILE, used + more):
            try:
                Store(root, MIB).close()
                break
            except StoreError as error:
                assert "ulimit -n" in str(error), error
    assert more > 1 and not list(root.iterdir())


DISK = """
set -e
truncate -s 96M "$1/image"
mkfs.{kind} -q {force} "$1/image"
mkdir "$1/disk"
mount -o loop "$1/image" "$1/disk"
"""


@pytest.fixture(params=["ext4", "xfs", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of about 90 MiB and yield its folder."""
    kind = request.param
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if kind != "tmpfs" and shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    disk = tmp_path / "disk"
    if kind == "tmpfs":
        command = 'set -e; mkdir "$1/disk"; mount -t tmpfs -o size=90m none "$1/disk"'
    else:
        command = DISK.format(kind=kind, force="-F" if kind == "ext4" else "-f")
    made = subprocess.run(
        ["sh", "-c", command, "sh", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"cannot make a small {kind} disk: {made.stderr.strip().splitlines()[-1]}")
    disk.chmod(0o700)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def free(disk: Path) -> int:
    about = os.statvfs(disk)
    return about.f_bavail * about.f_frsize


def test_full_disk_is_empty_again_after_close(small_disk: Path) -> None:
    before = free(small_disk)
    store = Store(small_disk, accept=("tmpfs",))
    extents: list[Extent] = []
    with pytest.raises(StoreFullError):
        while True:
            extents.append(store.reserve(3 * MIB + 5, f"t{len(extents)}"))
    assert len(extents) * 3 * MIB > before * 0.8
    memory = Memory(3 * MIB + 5, seed=3)
    for extent in extents:
        store.write(extent, memory.address, extent.name).wait()
    for extent in extents:
        back = Memory(memory.size)
        store.read(extent, back.address, extent.name).wait()
        assert back.get() == memory.get()
        store.release(extent)
    store.close()
    assert free(small_disk) >= before - MIB


def test_disk_filled_by_another_process_raises_store_full(small_disk: Path) -> None:
    store = Store(small_disk, accept=("tmpfs",))
    hog = small_disk / "hog"
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free(small_disk) - 2 * MIB, MIB))
    have = store.space.files[0].allocated_bytes
    if have < store.capacity_bytes - 8 * MIB:
        with pytest.raises(StoreFullError, match="cannot grow"):
            store.reserve(have + 6 * MIB, "t")
    hog.unlink()
    store.release(store.reserve(store.capacity_bytes - 6 * MIB, "t"))
    store.close()
