"""Private directories that killed processes left in the directory of a store.

A process makes a private directory, and removes it shortly afterwards. If the process is killed in between,
the private directory remains. The process holds a lock on the directory, and the kernel frees the lock at the
end of the process. A locked directory is live. The removal first takes the lock, so it never removes a live
directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .directories import open_and_check_store_directory
from .files import NAME, PREFIX

_OURS = re.compile(re.escape(PREFIX) + r"([0-9]{1,10})-[0-9a-f]{16}", re.ASCII)

State = Literal["live", "dead", "foreign"]


@dataclass(frozen=True, slots=True)
class StaleDirectory:
    """A directory or an unlinked file of a store.

    live      a directory during its creation, or an unlinked file of a running process
    dead      a directory that may be removed
    foreign   a directory with a name as teraio makes it, but with other contents; it is never removed
    """

    path: str
    pid: int
    size_bytes: int
    state: State


def is_missing(root: Path) -> bool:
    """Return True if the folder is missing.

    Return False if the folder exists, or if this cannot be found out. In the second case, a later open of the
    folder raises an error with the reason.
    """
    try:
        os.lstat(root)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR)
    return False


def list_store_directories(root: Path) -> list[StaleDirectory]:
    """Return the directories of this user's stores in `root`, and the unnamed files of running stores."""
    if is_missing(root):
        return []
    place = open_and_check_store_directory(root, accept=("tmpfs", "network"))
    try:
        found = [
            _classify_directory_maybe_remove(place.fd, root, name, remove=False)
            for name in _store_directory_names(place.fd)
        ]
    finally:
        os.close(place.fd)
    return [one for one in found if one is not None] + list_unlinked_files_in_use(root)


def remove_dead_directories(root: Path) -> list[StaleDirectory]:
    """Remove the dead directories in `root`, and return them. A directory is dead if the process that made it
    has ended."""
    if is_missing(root):
        return []
    place = open_and_check_store_directory(root, accept=("tmpfs", "network"))
    try:
        return remove_dead_directories_in_opened(place.fd, root)
    finally:
        os.close(place.fd)


def remove_dead_directories_in_opened(root_fd: int, root: Path) -> list[StaleDirectory]:
    """Remove the dead directories in an open directory of a store, and return them. A directory is dead if
    the process that made it has ended."""
    found = [
        _classify_directory_maybe_remove(root_fd, root, name, remove=True)
        for name in _store_directory_names(root_fd)
    ]
    return [one for one in found if one is not None and one.state == "dead"]


def _store_directory_names(root_fd: int) -> list[str]:
    return sorted(name for name in os.listdir(root_fd) if _OURS.fullmatch(name))


def _classify_directory_maybe_remove(
    root_fd: int, root: Path, name: str, remove: bool
) -> StaleDirectory | None:
    """Return the state of a directory: live, dead or foreign. With `remove`, remove a dead directory.

    Return None if another process has removed the directory, or if the directory belongs to another user.
    """
    match = _OURS.fullmatch(name)
    assert match is not None
    path, pid = str(root / name), int(match[1])
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    except OSError:
        return StaleDirectory(path, pid, 0, "foreign")  # a link, a file, or an unreadable directory
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return None
        size_bytes, known = _size_and_is_ours(fd)
        return StaleDirectory(
            path, pid, size_bytes, _classify_by_lock_maybe_remove(root_fd, name, fd, known, remove)
        )
    except FileNotFoundError:  # another process has removed the directory
        return None
    finally:
        os.close(fd)


def _classify_by_lock_maybe_remove(root_fd: int, name: str, fd: int, known: bool, remove: bool) -> State:
    """Return the state of the directory. A locked directory is live. With `remove`, remove a dead directory
    while this process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "live"
    if not known:
        return "foreign"
    if remove:
        _remove_locked_directory(root_fd, name, fd)
    return "dead"


def _size_and_is_ours(fd: int) -> tuple[int, bool]:
    """Return a pair: the number of bytes on disk, and True if the directory contains nothing except the
    store's own file."""
    size_bytes, known = 0, True
    for name in os.listdir(fd):
        with contextlib.suppress(FileNotFoundError):
            about = os.stat(name, dir_fd=fd, follow_symlinks=False)
            ours = name == NAME and stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
            known = known and ours
            size_bytes += about.st_blocks * 512 if ours else 0
    return size_bytes, known


def _remove_locked_directory(root_fd: int, name: str, fd: int) -> None:
    """Remove the locked directory. Do nothing if another directory has the name by now."""
    with contextlib.suppress(FileNotFoundError):
        named = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
        if (named.st_dev, named.st_ino) != (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(NAME, dir_fd=fd)
        with contextlib.suppress(OSError):  # not empty: another process just created a file in the directory
            os.rmdir(name, dir_fd=root_fd)


def list_unlinked_files_in_use(root: Path) -> list[StaleDirectory]:
    """Return the unlinked files in `root` that processes of this user hold open.

    If several processes hold a file open, it is returned once for each process.
    """
    prefix = os.path.join(os.path.abspath(root), PREFIX)
    seen: dict[tuple[int, int, int], StaleDirectory] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for number in os.listdir(f"/proc/{pid}/fd"):
                link = f"/proc/{pid}/fd/{number}"
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if not target.startswith(prefix) or not target.endswith(f"/{NAME} (deleted)"):
                        continue
                    about = os.stat(link)
                    key = (int(pid), about.st_dev, about.st_ino)
                    path = target.removesuffix(" (deleted)")
                    seen[key] = StaleDirectory(path, int(pid), about.st_blocks * 512, "live")
    return list(seen.values())
