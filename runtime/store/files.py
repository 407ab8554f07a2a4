"""One file per directory that holds the bytes of tensors. It has no name, so nothing is left however we end.

    root/                      the user's directory, open and checked
      teraio-<pid>-<random>/   made 0700, locked with flock for as long as we live      "made", "locked"
        bytes                  made 0600 with O_EXCL and O_NOFOLLOW, unlinked at once   "created", "unlinked"
                               then the directory goes too                              "removed"
    fallocate, as tensors come                                                          "growing", "grown"

The names live for some 100 us and the file is empty while it has one. Whoever is killed in between leaves an
empty directory whose lock is free: the next start clears it (stale_directories.py). The words on the right
are the points at which tests kill us.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat

from teraio.errors import StoreError, StoreFullError
from teraio.units import fmt_bytes

from . import kill_points
from .directories import Directory, directory_error, open_own_new_directory
from .extents import BLOCK

PREFIX = "teraio-"
NAME = "bytes"
STEP_BYTES = (
    1 << 30
)  # at most this much per fallocate: one of 10 TiB filled a disk for seconds before it failed
FIRST_BYTES = 64 << 20

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class StoreFile:
    """An open, unlinked file. `limit_bytes`: what it may become; `allocated_bytes`: what it has on the
    disk."""

    def __init__(self, place: Directory, limit_bytes: int) -> None:
        self.place = place
        self.limit_bytes = limit_bytes // BLOCK * BLOCK
        self.allocated_bytes = 0
        self.reserves = True  # fallocate works; else blocks come with the first write, and so may ENOSPC
        self.fd, self.direct = _make_unnamed_file(place)

    @property
    def directory_path(self) -> str:
        """For messages: the directory. The file itself has no name."""
        return str(self.place.path)

    def grow_to_at_least(self, size_bytes: int) -> None:
        """Makes the file at least that large: in doubling steps, so that calls are few and little is idle."""
        assert size_bytes <= self.limit_bytes, (size_bytes, self.limit_bytes)
        kill_points.reach("growing")
        while self.allocated_bytes < size_bytes:
            here = self.allocated_bytes
            eager = min(max(here, FIRST_BYTES), STEP_BYTES, self.limit_bytes - here)
            least = min(size_bytes - here, STEP_BYTES)
            error = self._try_to_extend(max(eager, least)) if eager > least else errno.ENOSPC
            error = self._try_to_extend(least) if error else 0
            if error:
                raise self._error_for_failed_growth(size_bytes - here, error)
        kill_points.reach("grown")

    def _try_to_extend(self, size_bytes: int) -> int:
        """0 or an errno. A failure leaves the file as it was: ext4 keeps what it got until that is cut
        off."""
        try:
            if self.reserves and self.place.free_bytes() < size_bytes:
                return errno.ENOSPC
            error = errno.EOPNOTSUPP
            if self.reserves:
                error = _fallocate(self.fd, self.allocated_bytes, size_bytes)
            if error in (errno.EOPNOTSUPP, errno.ENOSYS):
                self.reserves = False
                os.ftruncate(self.fd, self.allocated_bytes + size_bytes)
                error = 0
        except OSError as refused:
            error = refused.errno or errno.EIO
        if error:
            with contextlib.suppress(OSError):  # of a dead drive there is nothing to take back
                os.ftruncate(self.fd, self.allocated_bytes)
        else:
            self.allocated_bytes += size_bytes
        return error

    def _error_for_failed_growth(self, more_bytes: int, error: int) -> StoreError:
        what = f"the store in {self.directory_path} cannot grow by {fmt_bytes(more_bytes, up=True)}"
        has = f"it has {fmt_bytes(self.allocated_bytes)}{self._free_space_text()}"
        if error == errno.EFBIG:
            return StoreFullError(
                f"{what}: the file size limit is reached ({has}). Raise it: ulimit -f unlimited",
                errno=error,
                path=self.directory_path,
            )
        if error in (errno.ENOSPC, errno.EDQUOT):
            return StoreFullError(
                f"{what}: {os.strerror(error)} ({has}). Free space there, give a smaller store_size "
                f"or another directory in store",
                errno=error,
                path=self.directory_path,
            )
        return StoreError(
            f"{what}: {os.strerror(error)} ({has}). Check the drive (dmesg), or give another directory "
            f"in store",
            errno=error,
            path=self.directory_path,
        )

    def _free_space_text(self) -> str:
        try:
            return f", {fmt_bytes(self.place.free_bytes())} are free"
        except OSError:  # the drive is gone
            return ""

    def try_direct_io(self) -> bool:
        """Writes and reads one block: some file systems take O_DIRECT at open and refuse it after that."""
        with mmap.mmap(-1, BLOCK) as page:
            try:
                os.pwrite(self.fd, page, 0)
                os.preadv(self.fd, [page], 0)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise directory_error(
                        self.place.path,
                        f"the first block could not be written: {error.strerror}",
                        error.errno or 0,
                    ) from None
                fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                self.direct = False
        return self.direct

    def close(self, give_back: bool = True) -> None:
        """Gives the blocks back, even if another process still has the file open, and closes it. May be
        repeated.

        Without `give_back` no system call is made that could hang with the drive.
        """
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        if give_back:
            with contextlib.suppress(OSError):  # a dead drive: there is nothing to keep on it
                os.ftruncate(fd, 0)
        for each in (fd, self.place.fd):
            with contextlib.suppress(OSError):  # closed it is; what a file system has to say of it is late
                os.close(each)


def _fallocate(fd: int, offset: int, size_bytes: int) -> int:
    """fallocate(2) itself: posix_fallocate writes zeros where the file system has none. 0 or an errno."""
    while _LIBC.fallocate(fd, 0, offset, size_bytes) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0


def _make_unnamed_file(place: Directory) -> tuple[int, bool]:
    """(fd, whether it is direct) of a fresh file without a name."""
    try:
        name, directory = _make_locked_directory(place)
        try:
            fd, direct = _open_new_file(directory)
            try:
                os.unlink(NAME, dir_fd=directory)
                kill_points.reach("unlinked")
                _refuse_file_not_private(place, fd)
            except BaseException:
                os.close(fd)
                raise
        finally:
            _unlink_file(directory)  # an exception may have come between making and unlinking
            _remove_directory(place, name)  # before the fd is closed, and with it the lock
            os.close(directory)
    except OSError as error:
        remedy = "Raise the limit: ulimit -n 4096" if error.errno in (errno.EMFILE, errno.ENFILE) else None
        why = f"the file could not be made: {error.strerror}"
        raise (
            directory_error(place.path, why, error.errno or 0, remedy)
            if remedy
            else directory_error(place.path, why, error.errno or 0)
        ) from None
    kill_points.reach("removed")
    return fd, direct


def _remove_directory(place: Directory, name: str) -> None:
    with contextlib.suppress(
        OSError
    ):  # gone: somebody found it before we had locked it; full: not ours any more
        os.rmdir(name, dir_fd=place.fd)


def _make_locked_directory(place: Directory) -> tuple[str, int]:
    """(name, fd) of a private directory that is locked. Whoever clears leftovers may win the race for the
    lock."""
    for _ in range(16):
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=place.fd)
        kill_points.reach("made")
        try:
            fd = open_own_new_directory(place.path, name, place.fd)
        except FileNotFoundError:
            continue
        except BaseException:  # too many open files, for one
            _remove_directory(place, name)
            raise
        if _try_to_lock_directory(place, name, fd):
            kill_points.reach("locked")
            return name, fd
        _remove_directory(place, name)
        os.close(fd)
    raise directory_error(place.path, "somebody removes our directory as often as it is made")


def _try_to_lock_directory(place: Directory, name: str, fd: int) -> bool:
    """False: somebody looks whether the directory is a leftover, or has just removed it as one."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here = os.stat(name, dir_fd=place.fd, follow_symlinks=False)
    except (BlockingIOError, FileNotFoundError):
        return False
    return os.path.samestat(here, os.fstat(fd))


def _open_new_file(directory: int) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd, direct = os.open(NAME, flags | os.O_DIRECT, 0o600, dir_fd=directory), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _unlink_file(directory)  # some kernels make the file before they find out that it cannot be direct
        fd, direct = os.open(NAME, flags, 0o600, dir_fd=directory), False
    kill_points.reach("created")
    os.fchmod(fd, 0o600)
    return fd, direct


def _unlink_file(directory: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NAME, dir_fd=directory)


def _refuse_file_not_private(place: Directory, fd: int) -> None:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_nlink != 0:
        raise directory_error(
            place.path,
            f"the new file has {about.st_nlink} more names, uid {about.st_uid} and mode "
            f"{about.st_mode:o}: somebody interferes",
            errno.EPERM,
        )
    if stat.S_IMODE(about.st_mode) != 0o600:
        raise directory_error(
            place.path,
            f"files made there have mode {stat.S_IMODE(about.st_mode):04o} instead of 0600",
            errno.EPERM,
        )
