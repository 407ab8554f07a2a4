"""The unnamed file in each directory of a store. The kernel frees the file at the end of the process, even if
the process is killed.

    root/                      the user's directory, open and checked
      teraio-<pid>-<random>/   created 0700, then locked with flock                     "made", "locked"
        bytes                  created 0600, O_EXCL, O_NOFOLLOW; then unlinked          "created", "unlinked"
                               the directory is removed                                 "removed"
    fallocate grows the file when extents are reserved                                  "growing", "grown"

The right column lists the points at which tests kill the process. The directory and the file have names for
some 100 us. The file is empty in this time. A process that is killed in this time leaves a directory without
bytes and with a free lock. The next start of teraio removes the directory (stale_directories.py).
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
# The most bytes per call of fallocate. In a test, a single call for 10 TiB filled the disk, and failed only
# after seconds.
STEP_BYTES = 1 << 30
FIRST_BYTES = 64 << 20

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class StoreFile:
    """An open, unlinked file. It occupies `allocated_bytes` on the disk and may grow to `limit_bytes`."""

    def __init__(self, place: Directory, limit_bytes: int) -> None:
        self.place = place
        self.limit_bytes = limit_bytes // BLOCK * BLOCK
        self.allocated_bytes = 0
        # True: fallocate works. False: the first write allocates blocks, and may fail with ENOSPC.
        self.reserves = True
        self.fd, self.direct = _make_unnamed_file(place)

    @property
    def directory_path(self) -> str:
        """Return the path of the directory for messages, because the file itself has no name."""
        return str(self.place.path)

    def grow_to_at_least(self, size_bytes: int) -> None:
        """Grow the file to at least this size.

        Each growth doubles the size, but adds at most STEP_BYTES. So few calls are needed, and few bytes are
        unused.
        """
        assert size_bytes <= self.limit_bytes, (size_bytes, self.limit_bytes)
        kill_points.reach("growing")
        while self.allocated_bytes < size_bytes:
            allocated = self.allocated_bytes
            eager = min(max(allocated, FIRST_BYTES), STEP_BYTES, self.limit_bytes - allocated)
            least = min(size_bytes - allocated, STEP_BYTES)
            error = self._try_to_extend(max(eager, least)) if eager > least else errno.ENOSPC
            error = self._try_to_extend(least) if error else 0
            if error:
                raise self._error_for_failed_growth(size_bytes - allocated, error)
        kill_points.reach("grown")

    def _try_to_extend(self, size_bytes: int) -> int:
        """Extend the file and return 0, or return an errno and leave the file unchanged.

        After a failed fallocate, ext4 keeps the blocks that it has allocated. So this method truncates the
        file.
        """
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
            with contextlib.suppress(OSError):  # a file on a dead drive cannot be truncated
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
        except OSError:  # the drive does not answer
            return ""

    def try_direct_io(self) -> bool:
        """Write and read one block, and return True if direct I/O works.

        This test is needed, because some file systems accept O_DIRECT at open and refuse it in the first
        transfer.
        """
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
        """Free the blocks, even if another process still has the file open, and close the file. A second call
        does nothing.

        With `give_back=False`, do not free the blocks. The system call that frees them could hang if the
        drive hangs.
        """
        if self.fd < 0:
            return
        fd, self.fd = self.fd, -1
        if give_back:
            with contextlib.suppress(OSError):  # a file on a dead drive cannot be truncated
                os.ftruncate(fd, 0)
        for each in (fd, self.place.fd):
            with contextlib.suppress(OSError):  # a late write error; the descriptor is closed anyway
                os.close(each)


def _fallocate(fd: int, offset: int, size_bytes: int) -> int:
    """Call fallocate(2) and return 0 or an errno.

    posix_fallocate is not used, because on a file system without fallocate it would write zeros.
    """
    while _LIBC.fallocate(fd, 0, offset, size_bytes) != 0:
        if ctypes.get_errno() != errno.EINTR:
            return ctypes.get_errno()
    return 0


def _make_unnamed_file(place: Directory) -> tuple[int, bool]:
    """Create a file without a name. Return its fd, and True if the file is open for direct I/O."""
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
            _unlink_file(directory)  # an exception may have come before the other unlink
            _remove_directory(place, name)  # the close of `directory` frees the lock, so remove it before
            os.close(directory)
    except OSError as error:
        remedy = "Raise the limit: ulimit -n 4096" if error.errno in (errno.EMFILE, errno.ENFILE) else None
        why = f"the file could not be created: {error.strerror}"
        raise (
            directory_error(place.path, why, error.errno or 0, remedy)
            if remedy
            else directory_error(place.path, why, error.errno or 0)
        ) from None
    kill_points.reach("removed")
    return fd, direct


def _remove_directory(place: Directory, name: str) -> None:
    # Another process may have removed the directory, or put a file into it, before this process locked it.
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=place.fd)


def _make_locked_directory(place: Directory) -> tuple[str, int]:
    """Create and lock a private directory, and return (name, fd).

    Another process that removes stale directories may lock the new directory first. In that case, try again
    with another directory.
    """
    for _ in range(16):
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=place.fd)
        kill_points.reach("made")
        try:
            fd = open_own_new_directory(place.path, name, place.fd)
        except FileNotFoundError:
            continue
        except BaseException:  # for example too many open files
            _remove_directory(place, name)
            raise
        if _try_to_lock_directory(place, name, fd):
            kill_points.reach("locked")
            return name, fd
        _remove_directory(place, name)
        os.close(fd)
    raise directory_error(place.path, "another process removed each of our 16 new directories")


def _try_to_lock_directory(place: Directory, name: str, fd: int) -> bool:
    """Lock the directory. Return False if another process is checking whether the directory is stale, or has
    removed it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = os.stat(name, dir_fd=place.fd, follow_symlinks=False)
    except (BlockingIOError, FileNotFoundError):
        return False
    return os.path.samestat(named, os.fstat(fd))


def _open_new_file(directory: int) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd, direct = os.open(NAME, flags | os.O_DIRECT, 0o600, dir_fd=directory), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _unlink_file(directory)  # some kernels create the file before they refuse O_DIRECT
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
            f"{about.st_mode:o}: another process changed it",
            errno.EPERM,
        )
    if stat.S_IMODE(about.st_mode) != 0o600:
        raise directory_error(
            place.path,
            f"files created there have mode {stat.S_IMODE(about.st_mode):04o} instead of 0600",
            errno.EPERM,
        )
