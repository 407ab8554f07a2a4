"""How much a store may hold, and what it does when the disk says no: at the start, in mid-run, by a limit."""

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


def test_too_large_a_store_is_refused_before_it_is_made(root: Path) -> None:
    with pytest.raises(StoreFullError, match=r"shall be 4 PiB, .* are free in .*store_size"):
        Store([root, root], 1 << 52)
    assert not list(root.iterdir())


def test_the_size_may_follow_from_what_is_free(root: Path) -> None:
    asked: list[int] = []

    def eighth(free_bytes: int) -> int:
        asked.append(free_bytes)
        return 8 * MIB

    store = Store([root, root], eighth)
    assert store.capacity_bytes == 8 * MIB
    assert abs(asked[0] - shutil.disk_usage(root).free) < (1 << 30), "one disk is counted once"
    store.close()


class Tight:
    """A device that can pin little."""

    copier = None

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        if slab_bytes * count > 4 * MIB:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return _native.Slabs(slab_bytes, count)


class Broken(Tight):
    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_where_slabs_are_short_there_are_fewer_and_it_says_so(root: Path) -> None:
    store = Store(root, 16 * MIB, device=Tight())
    assert store.slab_bytes_total == 4 * MIB
    assert len(store.fallbacks) == 2 and "4 MiB instead of 8 MiB" in store.fallbacks[1]
    churn(store, 3)
    store.close()
    with pytest.raises(StoreError, match="no memory for"):
        Store(root, 16 * MIB, device=Broken())
    assert not list(root.iterdir())


def test_two_directories_on_one_disk_share_its_room(root: Path) -> None:
    store = Store([root, root])
    assert store.capacity_bytes <= shutil.disk_usage(root).free * 0.96
    store.close()


def test_a_failed_allocation_is_given_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ext4 keeps what it got before it ran out, until the file is cut off."""

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


def test_a_disk_that_is_gone_is_named_and_does_not_keep_the_store_from_its_end(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(root, 256 * MIB)
    system_close, closed = os.close, list[int]()

    def gone(*_: object) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    def close(fd: int) -> None:
        system_close(fd)
        closed.append(fd)
        gone()

    monkeypatch.setattr(os, "fstatvfs", gone)
    with pytest.raises(StoreError, match=r"cannot grow by .*: Transport endpoint is not connected"):
        store.reserve(200 * MIB, "large")
    monkeypatch.setattr(os, "close", close)
    store.close()
    assert len(closed) >= 2, "the file, and its directory"


def test_when_one_disk_cannot_grow_the_others_take_its_part(
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
    """A file system of its own of some 90 MiB."""
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


def test_a_disk_that_runs_full_is_left_as_it_was(small_disk: Path) -> None:
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


def test_a_disk_that_somebody_else_fills_is_a_full_store(small_disk: Path) -> None:
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
