"""The checks of a directory that will hold a store: owner, file system, permissions, free space.

In: a path. Out: an open directory that no other user can replace, or a StoreError. The error has the path,
the uid, the cause and the remedy. If the directory is missing, this module creates it. The module writes
nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from teraio.errors import StoreError
from teraio.units import fmt_bytes

_LIBC = ctypes.CDLL(None, use_errno=True)

# The names of file systems, by the field f_type of statfs(2). If a type is missing in this table, the file
# system counts as a disk.
_MAGIC = {
    0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs",
    0x6969: "NFS", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x517B: "SMB", 0x00C36400: "Ceph",
    0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0xF2F52010: "f2fs",
    0x794C7630: "overlayfs", 0x65735546: "FUSE", 0x01021997: "9p",
}  # fmt: skip
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_NETWORK = ("NFS", "CIFS", "SMB", "Ceph")

GIVE_ANOTHER = "Give another directory: options={'store': '/path/on/the/ssd'} or TERAIO_STORE"


@dataclass(frozen=True, slots=True)
class Directory:
    """An open directory. The code that opened `fd` also closes it."""

    path: Path
    fd: int
    device: int  # `st_dev`: the file system; its directories share the free bytes
    kind: str

    @property
    def is_in_memory(self) -> bool:
        return self.kind in _IN_MEMORY

    @property
    def is_on_network(self) -> bool:
        return self.kind in _NETWORK

    def free_bytes(self) -> int:
        """Return the number of bytes that this user may still write."""
        about = os.fstatvfs(self.fd)
        return about.f_bavail * about.f_frsize


def directory_error(path: Path, why: str, error: int = 0, remedy: str = GIVE_ANOTHER) -> StoreError:
    """Return the error for a directory that cannot be used."""
    code = f" ({errno.errorcode.get(error, error)})" if error else ""
    return StoreError(
        f"{path} cannot be a store for uid {os.geteuid()}: {why}{code}. {remedy}",
        errno=error,
        path=str(path),
    )


def file_system_name(fd: int) -> str:
    """Return the name of the file system, or "other" if the name is unknown."""
    about = (ctypes.c_long * 64)()  # room for struct statfs (120 bytes), whose first word is the type
    if _LIBC.fstatfs(fd, about) != 0:
        return "other"
    return _MAGIC.get(about[0] & 0xFFFFFFFF, "other")


def open_and_check_store_directory(
    path: Path, accept: Sequence[str] = (), parents: bool = False
) -> Directory:
    """Open and check the directory. If it is missing, create it. With `parents`, also create missing parents.

    Refuse a directory on tmpfs unless `accept` has "tmpfs", because bytes in tmpfs are in memory. Refuse a
    directory on a network file system unless `accept` has "network".
    """
    path = Path(os.path.abspath(path))
    fd = _open_or_make_directory(path, parents)
    try:
        _refuse_untrusted_directory(path, os.fstat(fd))
        place = Directory(path, fd, os.fstat(fd).st_dev, file_system_name(fd))
        if place.is_in_memory and "tmpfs" not in accept:
            raise directory_error(path, f"it lies on {place.kind}, which is memory, not a disk")
        if place.is_on_network and "network" not in accept:
            raise directory_error(path, f"it lies on {place.kind}: every fetch would cross the network")
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            raise directory_error(path, f"it is not writable{_owner_text(os.fstat(fd))}", errno.EACCES)
        if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            raise directory_error(path, "the file system is mounted read-only", errno.EROFS)
    except BaseException:
        os.close(fd)
        raise
    return place


def _open_or_make_directory(path: Path, parents: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for attempt in range(2):
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            if attempt == 0:
                _make_private_directory(path, parents)
        except OSError as error:
            raise _error_for_failed_open(path, error) from None
    raise directory_error(path, "it was removed while it was being opened", errno.ENOENT)


def _make_private_directory(path: Path, parents: bool) -> None:
    """Create the directory with mode 0700, independent of the umask."""
    try:
        path.mkdir(mode=0o700, parents=parents)
        os.close(open_own_new_directory(path, path))
    except FileExistsError:
        return
    except FileNotFoundError:
        raise directory_error(
            path,
            f"its parent {path.parent} is missing",
            errno.ENOENT,
            "Mount or create the parent first, or give another directory",
        ) from None
    except OSError as error:
        raise directory_error(path, "it is missing and cannot be created", error.errno or 0) from None


def open_own_new_directory(root: Path, name: str | Path, root_fd: int | None = None) -> int:
    """Open a directory that this process just created, and check its owner. Set its mode to 0700, independent
    of the umask.

    Follow no link. Raise an error if another user has replaced the directory.
    """
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    try:
        about = os.fstat(handle)
        if about.st_uid != os.geteuid():
            raise directory_error(
                root, f"{name} was replaced by a directory of uid {about.st_uid}", errno.EPERM
            )
        if stat.S_IMODE(about.st_mode) != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)


def _error_for_failed_open(path: Path, error: OSError) -> StoreError:
    if os.path.islink(path):
        return directory_error(
            path, "it is a symbolic link", error.errno or 0, f"Give its target, {os.path.realpath(path)}"
        )
    if error.errno == errno.ENOTDIR:
        return directory_error(path, "it is not a directory", errno.ENOTDIR)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return directory_error(
            path, "too many files are open", error.errno, "Raise the limit: ulimit -n 4096"
        )
    return directory_error(path, error.strerror or "it cannot be opened", error.errno or 0)


def _owner_text(about: os.stat_result) -> str:
    return f" (it belongs to uid {about.st_uid}, mode {stat.S_IMODE(about.st_mode):04o})"


def _refuse_untrusted_directory(path: Path, about: os.stat_result) -> None:
    """Raise an error if users other than this user and root can rename files in the directory.

    The owner must be this user or root. If everyone can write to the directory, it must have the sticky bit.
    """
    if about.st_uid not in (os.geteuid(), 0):
        raise directory_error(
            path,
            f"it belongs to uid {about.st_uid}",
            errno.EPERM,
            f"Give a subdirectory that you own, such as {path / f'teraio-{os.geteuid()}'}",
        )
    if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
        raise directory_error(
            path,
            "everyone may write to it and it has no sticky bit",
            errno.EPERM,
            f"chmod +t {path}, or chmod o-w {path}, or give a subdirectory that you own",
        )


def total_free_bytes(places: Sequence[Directory]) -> int:
    """Return the sum of the free bytes of all file systems. A file system with several directories counts
    only one time."""
    return sum(_free_bytes_by_device(places).values())


def _free_bytes_by_device(places: Sequence[Directory]) -> dict[int, int]:
    return {place.device: place.free_bytes() for place in places}


def divide_free_bytes(places: Sequence[Directory], size_bytes: int | None) -> list[int]:
    """Return the number of bytes that the store may take in each directory. Directories on the same file
    system get equal parts of its free bytes.

    Without `size_bytes`, the store may take 95 % of the free bytes. With `size_bytes`, the store may take all
    free bytes of a directory. The caller then limits the sum to `size_bytes`. Raise StoreFullError if the
    free bytes do not suffice.
    """
    free = _free_bytes_by_device(places)
    shared = {device: sum(place.device == device for place in places) for device in free}
    where = ", ".join(str(place.path) for place in places)
    total = sum(free.values())
    if size_bytes is None and not any(free.values()):
        raise _store_full_error(
            f"the disk is full: no bytes are free in {where}. Free some, or give another directory in store",
            where,
        )
    if size_bytes is not None and total < size_bytes:
        raise _store_full_error(
            f"store_size is {fmt_bytes(size_bytes, up=True)}, but {fmt_bytes(total)} are free in {where}. "
            f"Give a smaller store_size, free {fmt_bytes(size_bytes - total, up=True)}, or "
            f"add another directory to store",
            where,
        )
    part = 95 if size_bytes is None else 100
    return [free[place.device] // shared[place.device] * part // 100 for place in places]


def _store_full_error(message: str, path: str) -> StoreError:
    from teraio.errors import StoreFullError

    return StoreFullError(message, errno=errno.ENOSPC, path=path)


def choose_default_directories() -> tuple[Path, ...]:
    """Return one directory: a folder in the user's cache or in the temp directory. Choose the folder whose
    disk has more free bytes.

    The store creates the directory when it opens the directory.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "teraio" / "store"
    temp = Path(tempfile.gettempdir()) / f"teraio-{os.geteuid()}"
    free = {}
    for path in (cache, temp):
        try:
            fd = os.open(_nearest_existing_folder(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # the file system of the path does not answer
            continue
        try:
            place = Directory(path, fd, 0, file_system_name(fd))
            if not place.is_in_memory and not place.is_on_network:
                free[path] = place.free_bytes()
        finally:
            os.close(fd)
    if not free:
        raise StoreError(
            f"there is no disk for a store: {cache} and {temp} are in memory, on a network or on a disk that "
            f"does not answer. {GIVE_ANOTHER}",
            path=str(cache),
        )
    return (max(free, key=free.__getitem__),)


def _nearest_existing_folder(path: Path) -> Path:
    """Return the path, or its nearest existing parent if the path is no folder. Raise OSError if the file
    system does not answer."""
    while True:
        try:
            if stat.S_ISDIR(path.stat().st_mode):
                return path
        except (FileNotFoundError, NotADirectoryError):
            pass
        path = path.parent
