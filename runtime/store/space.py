"""Space: the files of a store, their free space, and the native transfer engine.

The store and its tickets share one Space. The caller of a method that changes extents or transfers must hold
`lock`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from teraio.errors import StoreError, StoreFullError, TransferTimeoutError
from teraio.units import fmt_bytes

from . import kill_points
from .extents import Extents, Piece, round_up_to_blocks
from .files import StoreFile

if TYPE_CHECKING:
    from teraio import _native

CLOSE_S = 4.0  # time limit of the close, because the interpreter's exit may take 5 s in total


class Extent:
    """A reservation of bytes in the store for one tensor. A write may replace the reserved pieces by other
    pieces."""

    __slots__ = ("generation", "name", "pending", "pieces", "released", "size_bytes", "tag", "writing")

    def __init__(self, size_bytes: int, name: str, tag: int, pieces: tuple[Piece, ...]) -> None:
        self.size_bytes = size_bytes
        self.name = name
        self.tag = tag  # unique among all extents of a store
        self.generation = 0  # number of writes of this extent so far
        self.pieces = pieces  # empty after a write that hung; the next write reserves new pieces
        self.pending: set[int] = set()  # the numbers of this extent's transfers in flight
        self.writing: int | None = None  # the number of the write in flight, if any
        self.released = False

    def begin_write(self) -> None:
        """Count another write."""
        self.generation += 1

    def begin_transfer(self, number: int, writes: bool) -> None:
        """Record that this transfer is in flight."""
        self.pending.add(number)
        if writes:
            self.writing = number

    def end_transfer(self, number: int) -> None:
        """Note that this transfer has ended."""
        self.pending.discard(number)
        if self.writing == number:
            self.writing = None

    def replace_pieces(self, pieces: tuple[Piece, ...] = ()) -> tuple[Piece, ...]:
        """Replace the extent's pieces by these pieces. Return the old pieces."""
        before, self.pieces = self.pieces, pieces
        return before

    def release(self) -> None:
        """Note that no tensor owns the extent any more."""
        assert not self.released, self.name
        self.released = True


class Space:
    """The extents of a store's files, and the transfers that use them."""

    def __init__(
        self,
        files: Sequence[StoreFile],
        extents: Extents,
        transfers: _native.Transfers,
        inherited: Sequence[int],
    ) -> None:
        self.files = files
        self.extents = extents
        self.transfers = transfers
        self.inherited = inherited  # all descriptors of the files, which a forked child closes
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.dropped: deque[tuple[int, Extent]] = deque()  # transfers whose ticket was garbage-collected
        self.keeps_times = False  # True: tickets record the times of their transfers
        self.shut = weakref.finalize(self, _close_transfers_and_files, transfers, files, self.pid)
        _SPACES.add(self)

    def keep_times(self) -> None:
        """Record the times of all transfers from now on."""
        self.keeps_times = True

    @property
    def path_for_errors(self) -> str:
        """Return a directory that an error can name if the faulty directory is unknown."""
        return self.files[0].directory_path

    @property
    def is_open(self) -> bool:
        return self.shut.alive

    def refuse_in_fork(self) -> None:
        """Raise an error if this process is a fork of the process that opened the store."""
        if os.getpid() != self.pid:
            raise StoreError(
                f"this store belongs to process {self.pid}, and its fork {os.getpid()} cannot use it. "
                f"Use the model in the parent only, or start workers with 'spawn'",
                path=self.path_for_errors,
            )

    def refuse_if_closed_or_forked(self) -> None:
        """Raise an error if the store is closed or belongs to another process."""
        self.refuse_in_fork()
        if not self.is_open:
            raise StoreError("the store is closed", path=self.path_for_errors)

    # ---- reservations

    @property
    def capacity_bytes(self) -> int:
        """Return the number of bytes that the store may hold. Dead bytes, which are never used again, do not
        count."""
        return self.extents.capacity_bytes - self.extents.dead_bytes

    def reserve_pieces(self, size_bytes: int, name: str) -> tuple[Piece, ...]:
        """Reserve pieces and grow the files to hold them. A file that cannot grow is skipped in this call."""
        limits = [space.limit_bytes for space in self.extents.files]
        refused: StoreError | None = None
        try:
            for _ in range(len(limits) + 1):
                pieces = self.extents.reserve_pieces(size_bytes)
                if pieces is None:
                    break
                refused = self._grow_files_for_pieces(pieces)
                if refused is None:
                    return pieces
        finally:
            for space, limit in zip(self.extents.files, limits):
                space.set_limit(limit)
        raise self._no_room_error(size_bytes, name, refused)

    def _grow_files_for_pieces(self, pieces: Sequence[Piece]) -> StoreError | None:
        for file, space in zip(self.files, self.extents.files):
            if space.end <= file.allocated_bytes:
                continue
            try:
                file.grow_to_at_least(space.end)
            except StoreError as error:
                self.extents.release_pieces(pieces, keep_whole=False)
                space.set_limit(file.allocated_bytes)
                return error
        return None

    def _no_room_error(self, size_bytes: int, name: str, refused: StoreError | None) -> StoreError:
        where = ", ".join(file.directory_path for file in self.files)
        need, free, capacity = round_up_to_blocks(size_bytes), self.extents.free_bytes, self.capacity_bytes
        if refused is not None:
            return type(refused)(
                f"no room for tensor '{name}' of {fmt_bytes(size_bytes)}: {refused}",
                errno=refused.errno,
                tensor=name,
                path=refused.path,
            )
        return StoreFullError(
            f"no room for tensor '{name}': it needs {fmt_bytes(need, up=True)}, {fmt_bytes(free)} of "
            f"{fmt_bytes(capacity)} are free in {where}. Give a larger store_size, another directory in "
            f"store, or more memory",
            tensor=name,
            path=where,
        )

    def release_pieces(self, pieces: Sequence[Piece]) -> None:
        """Free these pieces, whose bytes are no longer needed."""
        self.transfers.forget(pieces)
        self.extents.release_pieces(pieces)

    def release_idle_extent(self, extent: Extent) -> None:
        """Free the extent's pieces, unless the extent has a transfer in flight."""
        if extent.pending or not extent.pieces:
            return
        pieces = extent.replace_pieces()
        self.release_pieces(pieces)

    # ---- ends of transfers

    def retire_lost_pieces(self) -> None:
        """Mark the blocks of hung writes as dead, so that they are never used again. A hung write may still
        reach the drive later."""
        self.extents.retire_pieces(self.transfers.lost())

    def retire_failed_block(self, failure: Any) -> None:
        """Mark the block of this failed write as dead, so that it is never used again. `failure` has the
        position of the block."""
        self.extents.retire_pieces([(failure.file, failure.offset, failure.bytes)])

    def abandon_extent_pieces(self, extent: Extent) -> None:
        """Mark the pieces of hung writes as dead (never used again). Free the other pieces of the extent."""
        self.retire_lost_pieces()
        pieces = extent.replace_pieces()
        self.release_pieces(pieces)

    def note_transfer_finished(self, extent: Extent, number: int) -> None:
        """Note that this transfer has ended. If the extent was released during the transfer, free its
        pieces."""
        self.retire_lost_pieces()
        extent.end_transfer(number)
        if extent.released:
            self.release_idle_extent(extent)

    def finish_transfers_without_ticket(self) -> None:
        """Collect the results of ended transfers whose ticket was garbage-collected. Do not retry failed
        writes."""
        for _ in range(len(self.dropped)):
            number, extent = self.dropped.popleft()
            if self.transfers.state(number) == "active":
                self.dropped.append((number, extent))
                continue
            try:
                self.transfers.wait(number)
            except TransferTimeoutError:
                if extent.writing == number:
                    self.abandon_extent_pieces(extent)
            except StoreError:
                pass  # the ticket that would raise this error no longer exists
            self.note_transfer_finished(extent, number)


# ---- closing the store, and forks

_SPACES: weakref.WeakSet[Space] = weakref.WeakSet()


def _close_transfers_and_files(transfers: _native.Transfers, files: Sequence[StoreFile], pid: int) -> None:
    if os.getpid() != pid:
        return
    kill_points.reach("closing")
    joined = transfers.close(CLOSE_S)
    for file in files:
        file.close(give_back=joined)


def _close_files_in_forked_child() -> None:
    """Close the files in a forked child. Otherwise the files' blocks would outlive a killed parent."""
    for space in list(_SPACES):
        if space.is_open:
            for number in space.inherited:
                with contextlib.suppress(OSError):
                    os.close(number)
        space.shut.detach()


os.register_at_fork(after_in_child=_close_files_in_forked_child)
