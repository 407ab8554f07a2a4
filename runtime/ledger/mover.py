"""Moves of one record: evict, fetch, drop. The ledger counts a storage from the start of its fetch to the end
of its eviction; nothing here decides anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from teraio.errors import StoreError

from ..device.device import Device, Host
from ..device.pending_transfer import Mark, Pending, Start, Ticket
from ..store.source_files import FileCopy
from ..store.store import Store
from ..torch_extension.observer import InUseError, NotEvicted
from .record import HOST, SSD, Record, State
from .recorder import Recorder

Ended = TypeVar("Ended")


@dataclass
class MoveCounts:
    """What happened since the engine was made; `teraio.stats()` shows it."""

    slots: int = 0
    misses: int = 0
    evictions: int = 0
    drops: int = 0
    fetches: int = 0
    stall_ns: int = 0
    planned_moves: int = 0
    skipped_moves: int = 0
    failed_moves: int = 0
    touches: int = 0  # of user code on what was away, or on its way
    ahead: int = 0  # fetches for touches to come
    overrun_bytes: int = 0  # the most that user code needed beyond the budget
    step_overrun_bytes: int = 0  # the same, since the step began
    peak_bytes: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0


class _MoveInProgress:
    """A block in which a record says nothing reliable of its bytes."""

    __slots__ = ("before", "mover", "record")

    def __init__(self, mover: Mover, record: Record) -> None:
        self.mover, self.record = mover, record

    def __enter__(self) -> None:
        self.before, self.mover.moving = self.mover.moving, self.record

    def __exit__(self, *_: object) -> None:
        self.mover.moving = self.before


class Mover:
    def __init__(self, store: Store, device: Device, host: Host | None = None) -> None:
        self.store = store
        self.device = device
        self.host = host
        self.in_host: dict[int, Record] = {}  # what has a place there
        self.to_host: Collection[str] = ()  # what the plan of this step sends there
        self.resident_bytes = 0
        self.foreign_bytes = 0  # of these: not from the allocator that the device counts by
        self.file_bytes = 0  # read from the files that weights came from
        self.counts = MoveCounts()
        self.recorder: Recorder | None = None
        self.moving: Record | None = None  # whose move begins or ends at this moment
        self.resized: Callable[[Record, int], object] = lambda record, size_bytes: None  # is told
        self.not_written: Callable[[Record, StoreError], object] = lambda record, error: None  # is told

    @property
    def device_counted_bytes(self) -> int:
        """Of what is resident, what the device counts, too."""
        return self.resident_bytes - self.foreign_bytes

    @property
    def bytes_read_from_ssd(self) -> int:
        """SSD to device: from the store, and from the files that weights came from."""
        return self.store.total_read_bytes + self.file_bytes

    def add_resident_bytes(self, record: Record) -> None:
        """Its bytes count from here on."""
        self.resident_bytes += record.size_bytes
        if self.recorder is not None:
            self.recorder.add_resident_bytes(record)

    def subtract_resident_bytes(self, record: Record) -> None:
        self.resident_bytes -= record.size_bytes
        if record.foreign:
            record.foreign = False
            self.foreign_bytes -= record.size_bytes
        if self.recorder is not None:
            self.recorder.subtract_resident_bytes(record)

    def begin_evict(self, record: Record, tier: str | None = None) -> None:
        """Starts the write, to this tier if it has room. A clean record needs none: its bytes exist elsewhere
        unchanged. A plan that wants them in another tier has them written there, once."""
        assert record.state is State.DEVICE and record.evictable and not record.pins, record.name
        storage = record.storage()
        if storage is None or self._recount_if_user_resized(record, storage):
            return
        if not self.is_clean(record) or self._is_copy_in_other_tier(record, tier):
            record.clean = False
            try:
                record.pending = self.device.begin_copy_out(
                    storage, self._write_starter_for_tier(record, tier or record.copy_tier or HOST)
                )
            except InUseError:
                return
            if self.recorder is not None:
                self.recorder.note_move_begin(record, evict=True)
        record.state = State.LEAVING

    def is_clean(self, record: Record) -> bool:
        """Whether its copy holds the bytes of now, by all that is known of writes."""
        if self.device.observer is not None:
            record.clean = record.clean and not self.device.observer.is_written_since_copy(record.key)
        return record.clean

    def is_address_taken(self, record: Record) -> bool:
        """Whether someone has its address in this step."""
        return self.device.observer is not None and self.device.observer.is_address_taken(record.key)

    def mark_host_copy_clean(self, record: Record) -> None:
        """Its place in host memory holds the bytes of now, and it is on the device."""
        self._give_up_extent(record)
        record.source, record.clean = None, True
        if self.device.observer is not None and (storage := record.storage()) is not None:
            try:
                self.device.observer.watch_for_writes(storage)
            except InUseError:  # who uses it may write
                record.clean = False

    def _is_copy_in_other_tier(self, record: Record, tier: str | None) -> bool:
        """A file that has the bytes of now is as good as the store."""
        return (
            self.host is not None and tier is not None and record.copy_tier != (HOST if tier == HOST else SSD)
        )

    def _write_starter_for_tier(self, record: Record, tier: str) -> Start:
        """The way of its bytes to this tier, or to the SSD if that has no room. An older copy elsewhere is
        worth nothing any more."""
        record.source = None
        if tier == HOST and self.host is not None and self.reserve_host_place(record):
            self._give_up_extent(record)
            self.counts.to_host_bytes += record.size_bytes
            return self.host.copy_out_starter(record.place)
        self._give_up_place(record)
        if record.extent is None:
            record.extent = self.store.reserve(record.size_bytes, record.name)
        extent = record.extent
        return lambda s, mark: self.store.write(extent, s.data_ptr(), record.name, event=mark.handle)

    def reserve_host_place(self, record: Record) -> bool:
        """Whether this one, which is on the device, has a place in host memory to be written to."""
        place = (
            self._reserve_or_reclaim_place(self.host, record)
            if record.place is None and self.host is not None
            else None
        )
        if place is not None:
            record.place, self.in_host[record.key], record.clean = place, record, False
        return record.place is not None

    def _reserve_or_reclaim_place(self, host: Host, record: Record) -> Any:
        """None where there is no room: copies of bytes that have changed since make some, and, for what the
        plan sends there, those of what is in memory and goes elsewhere by the plan."""
        place = host.reserve(record.size_bytes)
        if place is None:
            planned = record.name in self.to_host
            for other in list(self.in_host.values()):
                worse = not other.clean or (planned and other.name not in self.to_host)
                if other.state is State.DEVICE and worse and not other.pins:
                    self._give_up_place(other)
                    other.clean = False
                    if (place := host.reserve(record.size_bytes)) is not None:
                        break
        return place

    def _give_up_extent(self, record: Record) -> None:
        if record.extent is not None:
            self.store.release(record.extent)
            record.extent = None

    def _give_up_place(self, record: Record) -> None:
        if record.place is not None:
            assert self.host is not None
            self.host.release(record.place)
            record.place = None
            del self.in_host[record.key]

    def end_evict(self, record: Record) -> None:
        """The bytes are gone from the device once the write is confirmed; if it failed they stay."""
        assert record.state is State.LEAVING, record.name
        pending, record.pending = record.pending, None
        record.state = State.DEVICE  # where it stays if the write fails, or someone uses it
        record.clean = True  # unless it was written meanwhile, which `is_clean` sees
        try:
            with _MoveInProgress(self, record):
                self._free_after_copy_or_drop(record, pending)
                record.state = State.AWAY
        except NotEvicted:
            return
        except BaseException:
            record.clean = pending is None
            raise
        self.subtract_resident_bytes(record)

    def _recount_if_user_resized(self, record: Record, storage: Any) -> bool:
        """Whether user code gave it another size: its copy holds too few bytes, or too many."""
        if storage.nbytes() == record.size_bytes:
            return False
        self.resized(record, storage.nbytes())
        return True

    def _free_after_copy_or_drop(self, record: Record, pending: Pending | None) -> None:
        if (storage := record.storage()) is not None and self._recount_if_user_resized(record, storage):
            if pending is not None:
                self._end_copy_counting_stall(self.device.end_copy_without_freeing, record, pending)
            raise InUseError
        if pending is not None:
            self._end_copy_counting_stall(self.device.end_copy_and_free, record, pending)
            self.counts.evictions += 1
            return
        if storage is not None:
            self.device.drop_bytes(storage)
        self.counts.drops += 1
        if self.recorder is not None:
            self.recorder.note_drop(record)

    def undo_evict(self, record: Record) -> None:
        """The record is needed after all: it never left. Its copy is good once the write is confirmed; if it
        failed, the bytes are here all the same."""
        assert record.state is State.LEAVING, record.name
        pending, record.pending = record.pending, None
        record.state = State.DEVICE
        if pending is not None:
            try:
                self._end_copy_counting_stall(self.device.end_copy_without_freeing, record, pending)
                record.clean = True
            except StoreError as error:
                self.not_written(record, error)

    def begin_fetch(self, record: Record, demand: bool = False) -> None:
        assert record.state is State.AWAY and record.copy_tier is not None, record.name
        storage = record.storage()
        if storage is None:
            return
        with _MoveInProgress(self, record):
            record.pending = self.device.begin_copy_in(
                storage, record.size_bytes, self._read_starter_of_copy(record, demand)
            )
            record.state = State.ARRIVING
        self.add_resident_bytes(record)
        self.counts.fetches += 1
        self.counts.from_host_bytes += record.size_bytes if record.copy_tier == HOST else 0
        self.file_bytes += 0 if record.source is None else record.size_bytes
        if self.recorder is not None:
            self.recorder.note_move_begin(record, evict=False, demand=demand)

    def _read_starter_of_copy(self, record: Record, demand: bool) -> Start:
        """The way of its bytes back."""
        extent, source = record.extent, record.source
        if record.place is not None:
            assert self.host is not None
            return self.host.copy_in_starter(record.place, demand)

        def start(target: Any, mark: Mark) -> Ticket:
            if source is not None:
                return source.start_reading(target.data_ptr(), record.name)
            assert extent is not None
            return self.store.read(extent, target.data_ptr(), record.name, demand, event=mark.handle)

        return start

    def end_fetch(self, record: Record) -> None:
        """A failed read leaves the record away: its bytes are never taken for good."""
        assert record.state is State.ARRIVING and record.pending is not None, record.name
        try:
            with _MoveInProgress(self, record):
                foreign = self._end_copy_counting_stall(self.device.end_copy_in, record, record.pending)
        except Exception:
            record.pending = None
            record.state = State.AWAY
            self.subtract_resident_bytes(record)
            raise
        if foreign:
            record.foreign = True
            self.foreign_bytes += record.size_bytes
        record.pending = None
        record.state = State.DEVICE

    def end_move(self, record: Record) -> None:
        """Have nothing of it in flight: what was on its way out stays, what was on its way in is there."""
        if record.state is State.LEAVING:
            self.undo_evict(record)
        elif record.state is State.ARRIVING:
            self.end_fetch(record)

    def replace_bytes_by_file(self, record: Record, source: FileCopy) -> None:
        """This file has its bytes from now on; what it had before is forgotten."""
        assert record.evictable and not record.pins, record.name
        self.end_move(record)
        storage = record.storage()
        if record.state is State.DEVICE and storage is not None:
            self.device.drop_bytes(storage, unwritten=False)
            self.subtract_resident_bytes(record)
            record.state = State.AWAY
        self._give_up_extent(record)
        self._give_up_place(record)
        record.source, record.clean = source, True

    def fill_with_nan(self, record: Record) -> None:
        """What was away is lost. Reading an emptied storage would crash: it gets bytes that no one can take
        for good (all ones is NaN in every floating type)."""
        assert record.state is State.AWAY, record.name
        storage, observer = record.storage(), self.device.observer
        if storage is not None:
            block = storage if observer is None else observer.make_empty_block(storage)
            block.resize_(record.size_bytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(block).fill_(0xFF)
            if observer is not None:
                observer.give_block_to_storage(storage, block)
        record.state = State.DEVICE
        record.clean = False
        self.add_resident_bytes(record)

    def _end_copy_counting_stall(
        self, end: Callable[[Pending], Ended], record: Record, pending: Pending
    ) -> Ended:
        began_ns = time.perf_counter_ns()
        try:
            return end(pending)
        finally:
            waited_ns = time.perf_counter_ns() - began_ns
            self.counts.stall_ns += waited_ns
            if self.recorder is not None:
                self.recorder.note_move_end(record, pending.ticket, waited_ns)

    def forget(self, record: Record) -> None:
        """The last tensor of this storage is gone: its bytes were freed with it."""
        assert record.pending is None and record.state is not State.ARRIVING, record.name
        if record.state is not State.AWAY:
            self.subtract_resident_bytes(record)
        self._give_up_extent(record)
        self._give_up_place(record)
        if self.device.observer is not None:
            self.device.observer.forget_storage(record.key, alive=not record.is_dead())
        record.release_weak_reference()
