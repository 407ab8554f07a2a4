"""The files from which weights were loaded. An unchanged weight is fetched from its file, so it needs no copy
in the store.

The file is kept open, so its name may be removed or reused. This module detects writes into the file by two
comparisons. (1) Before and after each read, it compares the file's size and modification time with the values
at the open. (2) It compares the digest of the bytes with the digest of the first read. After a detected
write, the weight cannot be fetched, and the error names the file.
"""

from __future__ import annotations

import ctypes
import os
import stat
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from teraio import _native
from teraio.errors import CorruptTensorError, FileFormatError, StoreReadError

CHUNK_BYTES = 8 * 2**20
THREADS = 2  # number of threads that read files

REMEDY = "Load the weights again from a file that does not change, or with copy=True"


class WeightFile:
    """A file that is kept open for reading as long as a weight needs the file."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FileFormatError(f"{path} cannot be opened: {error.strerror}") from None
        weakref.finalize(self, os.close, self.descriptor)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            raise FileFormatError(f"{path} is not a regular file")
        self.state = self._size_and_mtime()

    def _size_and_mtime(self) -> tuple[int, int]:
        about = os.fstat(self.descriptor)
        return about.st_size, about.st_mtime_ns

    def read(self, begin: int, size_bytes: int, address: int, name: str) -> None:
        """Read bytes of the file into memory at `address`. Raise CorruptTensorError if the file has changed
        since it was opened."""
        self._refuse_if_file_changed(name)
        at = 0
        while at < size_bytes:
            wanted = min(CHUNK_BYTES, size_bytes - at)
            target = (ctypes.c_char * wanted).from_address(address + at)
            try:
                count = os.preadv(self.descriptor, [target], begin + at)
            except OSError as error:
                raise StoreReadError(
                    f"{name} could not be read from {self.path}: {error}",
                    errno=error.errno or 0,
                    tensor=name,
                    path=self.path,
                ) from None
            if not count:
                break
            at += count
        self._refuse_if_file_changed(name)  # also detects a file that was truncated during the read

    def _refuse_if_file_changed(self, name: str) -> None:
        if self._size_and_mtime() != self.state:
            raise CorruptTensorError(
                f"{name} cannot be fetched from {self.path}: the file has changed since it was loaded. "
                f"{REMEDY}",
                tensor=name,
                path=self.path,
            )


@dataclass(slots=True)
class FileCopy:
    """A tensor's bytes in a file. `digest` is the digest of these bytes at the first read."""

    file: WeightFile
    begin: int
    size_bytes: int
    checked: bool
    digest: int | None = None

    def start_reading(self, address: int, name: str) -> FileTicket:
        return FileTicket(_reader_threads().submit(self.read_and_check_digest, address, name))

    def read_and_check_digest(self, address: int, name: str) -> None:
        self.file.read(self.begin, self.size_bytes, address, name)
        if not self.checked:
            return
        digest = _native.digest(address, self.size_bytes)
        if self.digest is None:
            self.digest = digest
        elif digest != self.digest:
            raise CorruptTensorError(
                f"{name} was fetched from {self.file.path} with other bytes than before. {REMEDY}",
                tensor=name,
                path=self.file.path,
            )


class FileTicket:
    """The ticket of a read: an object to wait for the read's end."""

    def __init__(self, reading: Future[None]) -> None:
        self.reading = reading

    def done(self) -> bool:
        return self.reading.done()

    def wait(self) -> None:
        self.reading.result()


@cache
def _reader_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "teraio-file")
