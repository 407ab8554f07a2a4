"""Tests of the directories in which a store keeps evicted tensors on disk.

The tests cover (1) accepted directories, (2) the access of other users, and (3) the errors for refused
directories.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_rig import MIB, churn, in_child

from teraio.errors import StoreError
from teraio.runtime.store import directories, files, kill_points, stale_directories
from teraio.runtime.store.store import Store

NOBODY = 65534
MEMORY = Path("/dev/shm")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can chown files, mount and change its uid")


def refused(path: Path, why: str) -> StoreError:
    """Open a store at this path, which must fail, and return the error.

    Check that the error matches `why`, and names the path and the uid. Check that no file descriptor leaks.
    """
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=why) as got:
        Store(path, MIB)
    assert str(path) in str(got.value) and got.value.path == str(path)
    assert f"uid {os.geteuid()}" in str(got.value)
    assert len(os.listdir("/proc/self/fd")) == open_before
    return got.value


# ---- refused directories


def test_missing_directory_is_created_private_for_any_umask(root: Path) -> None:
    for mask in (0, 0o777):
        path = root / f"new-{mask}"
        old = os.umask(mask)
        try:
            store = Store(path, MIB)
        finally:
            os.umask(old)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        about = os.fstat(store.space.files[0].fd)
        assert stat.S_IMODE(about.st_mode) == 0o600 and about.st_nlink == 0 and about.st_uid == os.geteuid()
        churn(store, 2, largest=MIB // 4)
        store.close()


def test_missing_parent_is_refused(root: Path) -> None:
    """The store does not create a missing parent, because the parent may be the mount point of a drive that
    is not mounted."""
    refused(root / "ssd" / "store", "parent .*ssd is missing")
    assert not list(root.iterdir())


def test_a_file_is_refused(root: Path) -> None:
    (root / "file").write_text("x")
    assert refused(root / "file", "not a directory").errno == errno.ENOTDIR


def test_a_symbolic_link_is_refused_and_its_target_named(root: Path) -> None:
    (root / "real").mkdir()
    (root / "link").symlink_to(root / "real")
    assert str(root / "real") in str(refused(root / "link", "symbolic link"))
    (root / "dangling").symlink_to(root / "nowhere")
    refused(root / "dangling", "symbolic link")
    assert not list((root / "real").iterdir()) and not (root / "nowhere").exists()


def test_a_fifo_is_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "fifo")
    refused(root / "fifo", "not a directory")


def test_world_writable_directory_without_sticky_bit_is_refused(root: Path) -> None:
    shared = root / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "chmod" in str(refused(shared, "no sticky bit"))
    shared.chmod(0o1777)
    Store(shared, MIB).close()


@as_root
def test_a_directory_of_another_uid_is_refused(root: Path) -> None:
    other = root / "other"
    other.mkdir(mode=0o700)
    os.chown(other, NOBODY, NOBODY)
    refused(other, f"belongs to uid {NOBODY}")


def as_nobody(root: Path, work: Callable[[], None]) -> int:
    """Run `work` in a child process as the user nobody, and return the child's exit status.

    Before that, let other users enter `root` and its parents.
    """
    for parent in (root, *root.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)

    def child() -> None:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work()

    return os.waitpid(in_child(child), 0)[1]


@as_root
def test_unwritable_directory_is_refused_and_shared_one_of_root_is_accepted(root: Path) -> None:
    (root / "ours").mkdir(mode=0o755)
    (root / "shared").mkdir()
    (root / "shared").chmod(0o1777)
    planted = root / "shared" / f"{files.PREFIX}1-{'a' * 16}"
    planted.mkdir(mode=0o700)

    def work() -> None:
        refused(root / "ours", "not writable.*uid 0, mode 0755")
        store = Store(root / "shared", 16 * MIB)
        churn(store, 3)
        store.close()
        with pytest.raises(StoreError):
            Store(root / "ours" / "below", MIB)

    assert as_nobody(root, work) == 0
    assert planted.exists(), "another user's directory was cleared"


# ---- directories and files that another process replaces while a store opens


def at_point(monkeypatch: pytest.MonkeyPatch, point: str, attack: Callable[[], None]) -> None:
    """Run `attack` when the creation of a store reaches `point`, a name from `kill_points.POINTS`."""
    monkeypatch.setattr(kill_points, "reach", lambda reached: attack() if reached == point else None)


def our_directory(root: Path) -> Path:
    return next(path for path in root.iterdir() if path.name.startswith(files.PREFIX))


def test_directory_replaced_by_a_link_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = root / "target"
    target.mkdir()

    def attack() -> None:
        ours = our_directory(root)
        ours.rmdir()
        ours.symlink_to(target)

    at_point(monkeypatch, "made", attack)
    refused(root, "could not be created")
    assert not list(target.iterdir())


@as_root
def test_directory_replaced_by_one_of_another_uid_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attack() -> None:
        ours = our_directory(root)
        os.chown(ours, NOBODY, NOBODY)

    at_point(monkeypatch, "made", attack)
    refused(root, f"replaced by a directory of uid {NOBODY}")


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "file", "hard"])
def test_a_planted_name_is_never_opened(root: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    victim = root / "victim"
    victim.write_text("precious")

    def attack() -> None:
        name = our_directory(root) / files.NAME
        match kind:
            case "link":
                name.symlink_to(victim)
            case "dangling":
                name.symlink_to(root / "nowhere")
            case "fifo":
                os.mkfifo(name)
            case "file":
                name.write_text("bait")
            case "hard":
                name.hardlink_to(victim)

    at_point(monkeypatch, "locked", attack)
    refused(root, "could not be created")
    assert victim.read_text() == "precious" and sorted(root.iterdir()) == [victim]


def test_a_file_that_got_a_second_name_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attack() -> None:
        (root / "copy").hardlink_to(our_directory(root) / files.NAME)

    at_point(monkeypatch, "created", attack)
    refused(root, "1 more names")
    assert (root / "copy").stat().st_size == 0


def test_directory_removed_after_each_creation_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_point(monkeypatch, "made", lambda: our_directory(root).rmdir())
    refused(root, "another process removed each of our 16 new directories")
    assert not list(root.iterdir())


def test_file_with_another_mode_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test imitates FAT and some network shares: the mount sets one mode for all files, and `fchmod` has
    no effect."""
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    at_point(monkeypatch, "created", lambda: (our_directory(root) / files.NAME).chmod(0o644))
    refused(root, "files created there have mode 0644 instead of 0600")


# ---- file systems


@pytest.mark.skipif(not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK), reason="no writable tmpfs")
def test_tmpfs_is_refused_or_counted_as_memory(caplog: pytest.LogCaptureFixture) -> None:
    path = MEMORY / f"teraio-test-{os.getpid()}"
    try:
        refused(path, "tmpfs, which is memory")
        with caplog.at_level(logging.WARNING, "teraio"):
            store = Store(path, 4 * MIB, accept=("tmpfs",))
        assert store.tmpfs_limit_bytes >= 4 * MIB and "still take RAM" in caplog.text
        churn(store, 3, largest=MIB // 2)
        store.close()
    finally:
        shutil.rmtree(path, ignore_errors=True)


def test_network_file_system_is_refused_unless_accepted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "file_system_name", lambda fd: "NFS")
    refused(root, "NFS")
    Store(root, MIB, accept=("network",)).close()


@pytest.mark.parametrize("at", ["open", "write"])
def test_missing_direct_io_is_logged_once_with_its_cost(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    """overlayfs refuses O_DIRECT when a file is opened. FUSE refuses it at the first write."""
    really = os.open if at == "open" else os.pwrite

    def refuse(*args: object, **named: object) -> int:
        where = args[0] if at == "write" else named.get("dir_fd")
        fd = args[0] if at == "write" else None
        direct = fcntl_flags(fd) & os.O_DIRECT if isinstance(fd, int) else int(args[1]) & os.O_DIRECT  # type: ignore[call-overload]
        if direct and where is not None:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open" if at == "open" else "pwrite", refuse)
    with caplog.at_level(logging.WARNING, "teraio"):
        store = Store(root, 16 * MIB)
    monkeypatch.undo()
    assert not store.is_direct
    assert len(store.fallbacks) == 1 == len(caplog.records)
    assert "quarter of the speed" in store.fallbacks[0] and str(root) in store.fallbacks[0]
    churn(store, 4)
    store.close()


def fcntl_flags(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL)


def test_a_fallback_can_be_made_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.StoreFile, "try_direct_io", lambda self: False)
    with pytest.raises(StoreError, match=r"no direct I/O.*on_fallback"):
        Store(root, MIB, on_fallback="error")
    assert not list(root.iterdir())


def test_default_is_the_disk_with_more_free_bytes_and_never_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, temp = root / "cache", root / "temp"
    temp.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(temp))
    monkeypatch.setattr(
        directories.Directory, "free_bytes", lambda self: 2 if temp in self.path.parents else 1
    )
    assert directories.choose_default_directories() == (temp / f"teraio-{os.geteuid()}",)
    monkeypatch.setattr(directories.Directory, "free_bytes", lambda self: 1)
    assert directories.choose_default_directories() == (cache / "teraio" / "store",)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(temp))
    Store(None, MIB).close()
    (root / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "file" / "below"))
    monkeypatch.setattr(
        directories.Directory, "free_bytes", lambda self: 2 if temp in self.path.parents else 1
    )
    assert directories.choose_default_directories() == (temp / f"teraio-{os.geteuid()}",)
    monkeypatch.setattr(directories, "file_system_name", lambda fd: "tmpfs")
    with pytest.raises(StoreError, match="no disk"):
        directories.choose_default_directories()


def make_unreachable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make system calls on paths in the folder fail, as on a mounted file system whose server process has
    ended."""
    for name in ("open", "stat", "lstat"):
        system = getattr(os, name)

        def call(path: Any, *args: Any, system: Any = system, **more: Any) -> Any:
            if str(path).startswith(str(folder)):
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
            return system(path, *args, **more)

        monkeypatch.setattr(os, name, call)


def test_unreachable_file_system_is_refused_and_never_the_default(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable, temp = root / "unreachable", root / "temp"
    unreachable.mkdir()
    temp.mkdir()
    make_unreachable(unreachable, monkeypatch)
    for path in (unreachable, unreachable / "below"):
        with pytest.raises(StoreError, match=f"{path} cannot be a store .* Transport endpoint"):
            directories.open_and_check_store_directory(path)
        with pytest.raises(StoreError, match="Transport endpoint"):
            stale_directories.list_store_directories(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(unreachable))
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(temp))
    assert directories.choose_default_directories() == (temp / f"teraio-{os.geteuid()}",)


def test_importing_the_store_needs_no_torch() -> None:
    code = "import sys, teraio.runtime.store.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
