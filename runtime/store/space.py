"""Space: the files of a store, the room in them, and the native engine that moves bytes.

The store and its tickets share it. Whoever calls a method that changes room or transfers holds `lock`.
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

CLOSE_S = 4.0  # the interpreter's exit may take 5 s in all


class Extent:
    """A place in the store, as large as the tensor that owns it. Where that is may change with a write."""

    __slots__ = ("generation", "name", "pending", "pieces", "released", "size_bytes", "tag", "writing")

    def __init__(self, size_bytes: int, name: str, tag: int, pieces: tuple[Piece, ...]) -> None:
        self.size_bytes = size_bytes
        self.name = name
        self.tag = tag  # no two extents of a store ever share one
        self.generation = 0  # one more for each write
        self.pieces = pieces  # empty: lost to a drive that hung; the next write finds another place
        self.pending: set[int] = set()  # transfers under way in it
        self.writing: int | None = None  # the one of them that writes
        self.released = False


class Space:
    """Room in files, and the transfers that use it."""

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
        self.inherited = inherited  # all descriptors of the files: a fork's child closes them
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.dropped: deque[tuple[int, Extent]] = deque()  # transfers whose tickets nobody holds any more
        self.keeps_times = False  # tickets say when their transfers ran
        self.shut = weakref.finalize(self, _close_transfers_and_files, transfers, files, self.pid)
        _SPACES.add(self)

    @property
    def path_for_errors(self) -> str:
        """The file that errors name where no other is known."""
        return self.files[0].directory_path

    @property
    def is_open(self) -> bool:
        return self.shut.alive

    def refuse_in_fork(self) -> None:
        """Raise an error in a fork of the process that opened the store."""
        if os.getpid() != self.pid:
            raise StoreError(
                f"this store belongs to process {self.pid}; in its fork {os.getpid()} nothing of it can "
                f"be reached. Use the model in the parent only, or start workers with 'spawn'",
                path=self.path_for_errors,
            )

    def refuse_if_closed_or_forked(self) -> None:
        """Raise an error if the store is closed, or another process's."""
        self.refuse_in_fork()
        if not self.is_open:
            raise StoreError("the store is closed", path=self.path_for_errors)

    # ---- room

    @property
    def capacity_bytes(self) -> int:
        """How much it may hold, less what drives have spoilt."""
        return self.extents.capacity_bytes - self.extents.dead_bytes

    def reserve_pieces(self, size_bytes: int, name: str) -> tuple[Piece, ...]:
        """Return pieces in files that are large enough. A file that cannot grow now is left out for this
        once."""
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
        """Take these pieces back: their bytes are worth nothing any more."""
        self.transfers.forget(pieces)
        self.extents.release_pieces(pieces)

    def release_idle_extent(self, extent: Extent) -> None:
        """Take the extent's pieces back, once no transfer is under way in it."""
        if extent.pending or not extent.pieces:
            return
        pieces, extent.pieces = extent.pieces, ()
        self.release_pieces(pieces)

    # ---- ends of transfers

    def retire_lost_pieces(self) -> None:
        """Never use the blocks of writes again that never came back: they may still come."""
        self.extents.retire_pieces(self.transfers.lost())

    def retire_failed_block(self, failure: Any) -> None:
        """Never use the block of this failed write again. The native engine adds where it happened."""
        self.extents.retire_pieces([(failure.file, failure.offset, failure.bytes)])

    def abandon_extent_pieces(self, extent: Extent) -> None:
        """Give the extent's place up, into which a late write may still come; take back the rest of it."""
        self.retire_lost_pieces()
        pieces, extent.pieces = extent.pieces, ()
        self.release_pieces(pieces)

    def note_transfer_finished(self, extent: Extent, number: int) -> None:
        """Note that this transfer is over. The extent goes if it was only waiting for that."""
        self.retire_lost_pieces()
        extent.pending.discard(number)
        if extent.writing == number:
            extent.writing = None
        if extent.released:
            self.release_idle_extent(extent)

    def finish_transfers_without_ticket(self) -> None:
        """Settle dropped transfers that have ended, without a second try."""
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
                pass  # nobody asks
            self.note_transfer_finished(extent, number)


# ---- the end, and forks

_SPACES: weakref.WeakSet[Space] = weakref.WeakSet()


def _close_transfers_and_files(transfers: _native.Transfers, files: Sequence[StoreFile], pid: int) -> None:
    if os.getpid() != pid:
        return
    kill_points.reach("closing")
    joined = transfers.close(CLOSE_S)
    for file in files:
        file.close(give_back=joined)


def _close_files_in_forked_child() -> None:
    """Let go of the files in the child of a fork, or their blocks would outlive a parent that is killed."""
    for space in list(_SPACES):
        if space.is_open:
            for number in space.inherited:
                with contextlib.suppress(OSError):
                    os.close(number)
        space.shut.detach()


os.register_at_fork(after_in_child=_close_files_in_forked_child)
