"""The SSD tier. It keeps the bytes of evicted tensors in unnamed files, and moves the bytes in the
background.

    reserve(size) -> Extent        write(extent, address) -> Ticket
    release(extent)                read(extent, address) -> Ticket

An extent is a reservation for one tensor, and a ticket is a pending transfer. A ticket is finished when
`wait` has returned or raised, or when `done` has returned True. Only then may the tensor's memory be reused.
After a failed write, the bytes in memory are the only valid copy. After a fork, only the parent can use the
store.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from teraio import _native
from teraio.errors import StoreError

from . import stale_directories
from .directories import (
    GIVE_ANOTHER,
    Directory,
    choose_default_directories,
    divide_free_bytes,
    open_and_check_store_directory,
    total_free_bytes,
)
from .extents import Extents, round_up_to_blocks
from .files import StoreFile
from .slabs import HUGE_PAGE, LANES, DeviceSide, make_slabs
from .space import Extent, Space
from .ticket import StoreTicket
from .write_rate import WriteRate

log = logging.getLogger("teraio")

OnFallback = Literal["warn", "error"]
Directories = Path | str | Sequence[Path | str] | None
Size = int | Callable[[int], int | None] | None


class Store:
    """The store of a session, with one private file in each directory.

    size_bytes     the bytes that the store may hold, or a function that computes them from the free bytes;
                   None means 95 % of the free bytes
    device         the device with the tensors; None means RAM
    bandwidths     rates of the directories; a faster directory gets a larger part of each tensor
    memory_bytes   the budget, which includes the slabs (the buffers of the store)
    deadline_s     the time limit of one operation of a drive
    on_fallback    "warn" logs each slower mode only once, "error" raises an error
    accept         "tmpfs", "network"; directories of these two kinds are refused unless listed here
    wrap           a function with which tests wrap the I/O
    """

    def __init__(
        self,
        directories: Directories = None,
        size_bytes: Size = None,
        *,
        checksums: bool = True,
        deadline_s: float = 60.0,
        memory_bytes: int | None = None,
        bandwidths: Sequence[int] | None = None,
        on_fallback: OnFallback = "warn",
        accept: Sequence[str] = (),
        device: DeviceSide | None = None,
        wrap: Callable[[_native.Io], _native.Io] | None = None,
        write_per_day_bytes: int | None = None,
    ) -> None:
        self.fallbacks: list[str] = []
        self.checksums = checksums
        self._on_fallback = on_fallback
        self.allowance = WriteRate(write_per_day_bytes) if write_per_day_bytes else None
        self._tags = 0
        self._files: list[StoreFile] = []
        try:
            room, limit = self._open_files(
                _list_directory_paths(directories), size_bytes, accept, parents=directories is None
            )
            self._slabs = make_slabs(device, memory_bytes, len(self._files), self._report_fallback)
            transfers = self._start_transfer_engine(
                wrap, checksums, deadline_s, device.copier if device else None
            )
        except BaseException:
            for file in self._files:
                file.close()
            raise
        self.space = Space(self._files, Extents(room, bandwidths, limit), transfers, self._inherited)

    @classmethod
    def open(cls, directories: Directories = None, size_bytes: Size = None, **settings: Any) -> Store:
        """Open a store with the arguments of the constructor."""
        return cls(directories, size_bytes, **settings)

    def _open_files(
        self, paths: Sequence[Path], size_bytes: Size, accept: Sequence[str], parents: bool
    ) -> tuple[list[int], int | None]:
        """Open a file in each directory. Return the size limit of each file. Also return the limit of all
        files together, or None."""
        places: list[Directory] = []
        try:
            for path in paths:
                places.append(open_and_check_store_directory(path, accept, parents))
                with contextlib.suppress(OSError):  # if this fails, a later start removes the directories
                    stale_directories.remove_dead_directories_in_opened(places[-1].fd, places[-1].path)
            if callable(size_bytes):
                size_bytes = size_bytes(total_free_bytes(places))
            room = divide_free_bytes(places, size_bytes)
            while places:
                self._files.append(StoreFile(places[0], room[len(self._files)]))
                del places[0]
        finally:
            for place in places:
                os.close(place.fd)
        for file in self._files:
            file.grow_to_at_least(min(round_up_to_blocks(1), file.limit_bytes))
            if not file.try_direct_io():
                self._report_fallback(
                    f"no direct I/O in {file.directory_path} ({file.place.kind}): bytes go through the "
                    "page cache, at "
                    f"about a quarter of the speed and 15 times the CPU time"
                )
            if not file.reserves:
                self._report_fallback(
                    f"{file.directory_path} ({file.place.kind}) cannot reserve space: a full disk "
                    "shows only in mid-run"
                )
            if file.place.is_in_memory:
                self._report_fallback(
                    f"{file.directory_path} is memory ({file.place.kind}): tensors evicted to it still "
                    "take RAM"
                )
        return room, size_bytes

    def _start_transfer_engine(
        self,
        wrap: Callable[[_native.Io], _native.Io] | None,
        checksums: bool,
        deadline_s: float,
        copier: _native.Copier | None,
    ) -> _native.Transfers:
        try:
            self._inherited: list[int] = []
            io: _native.Io = _native.ThreadIo([(file.fd, file.directory_path) for file in self._files], LANES)
            self._inherited = _descriptors_of_files(self._files)
        except OSError as error:
            raise StoreError(
                f"the store's {LANES * len(self._files)} threads or file descriptors are refused: {error}. "
                f"Raise ulimit -u or ulimit -n",
                errno=error.errno or 0,
                path=self._files[0].directory_path,
            ) from None
        return _native.Transfers(
            wrap(io) if wrap else io, self._slabs, checksums=checksums, deadline_s=deadline_s, copier=copier
        )

    def _report_fallback(self, what: str) -> None:
        if self._on_fallback == "error":
            raise StoreError(
                f"{what} (on_fallback is 'error'). {GIVE_ANOTHER}", path=self._files[0].directory_path
            )
        if what not in self.fallbacks:
            self.fallbacks.append(what)
            log.warning("teraio: %s", what)

    # ---- extents

    def reserve(self, size_bytes: int, name: str) -> Extent:
        """Reserve an extent for a tensor. If the store is full, raise StoreFullError with the needed and the
        free bytes."""
        assert size_bytes > 0, name
        self.space.refuse_if_closed_or_forked()
        with self.space.lock:
            self.space.finish_transfers_without_ticket()
            self._tags += 1
            return Extent(size_bytes, name, self._tags, self.space.reserve_pieces(size_bytes, name))

    def release(self, extent: Extent) -> None:
        """Free the extent as soon as its transfers in flight have ended."""
        if os.getpid() != self.space.pid:
            return
        with self.space.lock:
            extent.release()
            self.space.finish_transfers_without_ticket()
            self.space.release_idle_extent(extent)

    # ---- transfers

    def write(
        self, extent: Extent, address: int, name: str, demand: bool = False, event: int = 0
    ) -> StoreTicket:
        """Write the memory at `address` to the extent. The write begins after the device has reached `event`.

        The caller must keep the bytes unchanged until the ticket is finished.
        """
        self.space.refuse_if_closed_or_forked()
        if self.allowance is not None:
            self.allowance.wait_until_allowed(extent.size_bytes)
        with self.space.lock:
            self.space.finish_transfers_without_ticket()
            assert not extent.released and not extent.pending, (
                f"{name}: a transfer of this extent is still in flight"
            )
            if not extent.pieces:  # a write hung, so its pieces were abandoned
                extent.replace_pieces(self.space.reserve_pieces(extent.size_bytes, name))
            return StoreTicket(self.space, "write", extent, address, name, demand, event)

    def read(
        self, extent: Extent, address: int, name: str, demand: bool = False, event: int = 0
    ) -> StoreTicket:
        """Read the extent into the memory at `address`. Until the ticket is finished, the contents of this
        memory are undefined.

        With `demand`, the read overtakes prefetches.
        """
        self.space.refuse_if_closed_or_forked()
        with self.space.lock:
            self.space.finish_transfers_without_ticket()
            assert not extent.released and extent.writing is None, f"{name}: it is still being written"
            return StoreTicket(self.space, "read", extent, address, name, demand, event)

    # ---- properties for users of the store

    @property
    def directories(self) -> tuple[Path, ...]:
        return tuple(file.place.path for file in self._files)

    @property
    def capacity_bytes(self) -> int:
        """Return the number of bytes that the store may hold. Blocks that failed or hung do not count."""
        return self.space.capacity_bytes

    @property
    def free_bytes(self) -> int:
        return self.space.extents.free_bytes

    @property
    def slab_bytes_total(self) -> int:
        """Return the number of bytes of the slabs (the store's buffers), in whole huge pages. The option
        `memory` includes these bytes."""
        return -(-self._slabs.arena_bytes // HUGE_PAGE) * HUGE_PAGE

    @property
    def tmpfs_limit_bytes(self) -> int:
        """Return the size limit of the files in tmpfs, whose bytes count as host memory."""
        return sum(file.limit_bytes for file in self._files if file.place.is_in_memory)

    @property
    def is_direct(self) -> bool:
        return (
            all(file.direct for file in self._files) and self.space.transfers.stats()["buffered_files"] == 0
        )

    @property
    def total_written_bytes(self) -> int:
        return int(self.space.transfers.stats()["bytes_written"])

    @property
    def total_read_bytes(self) -> int:
        return int(self.space.transfers.stats()["bytes_read"])

    def enable_transfer_times(self) -> None:
        """Make tickets record the times of their transfers."""
        self.space.keep_times()

    def weigh_directories(self, bandwidths: Sequence[int]) -> None:
        """Distribute extents to the directories in proportion to these bandwidths."""
        self.space.extents.change_weights(bandwidths)

    def close(self) -> None:
        """Finish running transfers, join threads and free the files. This takes at most 5 s. Repeated calls
        are safe."""
        self.space.shut()


def _list_directory_paths(directories: Directories) -> list[Path]:
    if directories is None:
        return list(choose_default_directories())
    if isinstance(directories, str | Path):
        return [Path(directories)]
    assert directories, "give at least one directory"
    return [Path(directory) for directory in directories]


def _descriptors_of_files(files: Sequence[StoreFile]) -> list[int]:
    """Return all descriptors of these files in this process. The transfer engine has further descriptors of
    the files, which are included."""
    wanted = {(about.st_dev, about.st_ino) for about in (os.fstat(file.fd) for file in files)}
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            about = os.fstat(number)
        except OSError:
            continue  # os.listdir itself used this descriptor, and has closed it
        if (about.st_dev, about.st_ino) in wanted:
            found.append(number)
    return found
