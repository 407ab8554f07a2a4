"""Moves of one record: evict, fetch, drop.

In: a record, and the tier to evict it to. Out: the record's state, and the count of resident bytes.

A storage counts as resident from the begin of its fetch to the end of its eviction. `Residency`, and not the
mover, chooses the records to move. The mover reports failures and unmovable storages to `Residency`, through
the methods of `MoverOwner`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from teraio.errors import StoreError

from ..device.device import OUT_OF_MEMORY, Device, Host
from ..device.pending_transfer import Mark, Pending, Start, Ticket
from ..store.source_files import FileCopy
from ..store.store import Store
from ..torch_extension.observer import InUseError, NotEvicted
from .adoption import is_resizable
from .record import HOST, SSD, Record, State
from .recorder import Recorder

Ended = TypeVar("Ended")


@dataclass
class MoveCounts:
    """Counts of moves since the engine was made, for `teraio.stats()`."""

    slots: int = 0
    misses: int = 0
    evictions: int = 0
    drops: int = 0
    fetches: int = 0
    stall_ns: int = 0
    planned_moves: int = 0
    skipped_moves: int = 0
    failed_moves: int = 0
    touches: int = 0  # reads by user code that had to wait: a tensor was evicted or being fetched
    ahead: int = 0  # fetches that began before user code used the tensor
    overrun_bytes: int = 0  # the largest number of bytes beyond the budget so far
    step_overrun_bytes: int = 0  # the largest number of bytes beyond the budget in this step
    peak_bytes: int = 0
    to_host_bytes: int = 0
    from_host_bytes: int = 0
    owed_updates: int = 0  # updates that an optimizer's step has put off
    late_updates: int = 0  # owed updates that ran at a slot of a program
    settled_updates: int = 0  # owed updates that ran elsewhere, because code needed their tensors
    backward_updates: int = 0  # updates that ran in a backward

    def add(self, **amounts: int) -> None:
        """Add each amount to the count that has the argument's name."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    def note_peak(self, size_bytes: int) -> None:
        """Raise the peak to `size_bytes` if the peak is lower. This number of bytes is in use now."""
        self.peak_bytes = max(self.peak_bytes, size_bytes)

    def note_overrun(self, size_bytes: int) -> None:
        """Raise the largest overrun to `size_bytes` if it is lower. An overrun is a number of bytes beyond
        the budget."""
        self.overrun_bytes = max(self.overrun_bytes, size_bytes)
        self.step_overrun_bytes = max(self.step_overrun_bytes, size_bytes)

    def count_slots(self, count: int = 1) -> None:
        """Add `count` to the number of slots that have run."""
        self.slots += count

    def begin_step(self) -> None:
        """Begin a step: set the peak and the step's overrun to 0."""
        self.peak_bytes = self.step_overrun_bytes = 0


class MoverOwner(Protocol):
    """The methods of `Residency` that the mover calls."""

    def note_eviction_begun(self, record: Record) -> None:
        """Record that a new eviction of this record begins."""
        ...

    def note_failed_eviction(self, record: Record, error: StoreError) -> object:
        """Keep a record resident, because the write of its eviction failed."""
        ...

    def recount_resized(self, record: Record, size_bytes: int) -> object:
        """Count the record's storage with its new size, because user code has resized the storage."""
        ...

    def keep_unresizable(self, record: Record) -> object:
        """Keep this record resident, because its storage can no longer be emptied in place."""
        ...


class _MoveInProgress:
    """A `with` block in which a move of the record begins or ends. In the block, the record's state may be
    wrong."""

    __slots__ = ("before", "mover", "record")

    def __init__(self, mover: Mover, record: Record) -> None:
        self.mover, self.record = mover, record

    def __enter__(self) -> None:
        self.before = self.mover.change_moving(self.record)

    def __exit__(self, *_: object) -> None:
        self.mover.change_moving(self.before)


class Mover:
    """The object that begins and ends moves of single records, and counts the resident bytes."""

    def __init__(self, store: Store, device: Device, owner: MoverOwner, host: Host | None = None) -> None:
        self.store = store
        self.device = device
        self.owner = owner
        self.host = host
        self.in_host: dict[int, Record] = {}  # records that have a place in host memory
        # Names of the tensors that the plan of this step evicts to the host.
        self.to_host: Collection[str] = ()
        self.resident_bytes = 0
        self.foreign_bytes = 0  # part of `resident_bytes` that the device's own count does not include
        self.file_bytes = 0  # bytes that fetches have read from the files of loaded weights
        self.counts = MoveCounts()
        self.recorder: Recorder | None = None
        self.moving: Record | None = None  # the record whose move begins or ends now

    @property
    def device_counted_bytes(self) -> int:
        """Return the resident bytes that the device's own count of used bytes includes."""
        return self.resident_bytes - self.foreign_bytes

    @property
    def uncounted_bytes(self) -> int:
        """Return the used bytes of the device that belong to no record. A record whose tensor was freed
        counts until the engine forgets the record."""
        return self.device.used_bytes() - self.device_counted_bytes

    @property
    def bytes_read_from_ssd(self) -> int:
        """Return the number of bytes read from SSDs: from the store and from the files of loaded weights."""
        return self.store.total_read_bytes + self.file_bytes

    def record_to(self, recorder: Recorder) -> None:
        """Report moves to this recorder from now on."""
        self.recorder = recorder
        self.store.enable_transfer_times()

    def expect_host_copies(self, names: Collection[str]) -> None:
        """Set the names of the tensors that the step's plan evicts to the host. If host memory is short,
        these tensors get it first."""
        self.to_host = names

    def change_moving(self, record: Record | None) -> Record | None:
        """Set the record whose move begins or ends now, or None. Return the previous record."""
        before, self.moving = self.moving, record
        return before

    # ---- counts

    def add_resident_bytes(self, record: Record) -> None:
        """Count the record's bytes as resident from now on."""
        self.resident_bytes += record.size_bytes
        if self.recorder is not None:
            self.recorder.add_resident_bytes(record)

    def subtract_resident_bytes(self, record: Record) -> None:
        """Stop counting the record's bytes as resident."""
        self.resident_bytes -= record.size_bytes
        if record.foreign:
            self._change_foreign(record, False)
        if self.recorder is not None:
            self.recorder.subtract_resident_bytes(record)

    def add_foreign_bytes(self, record: Record) -> None:
        """Record that the device's own count of used bytes does not include this record's bytes."""
        if not record.foreign:
            self._change_foreign(record, True)

    def _change_foreign(self, record: Record, foreign: bool) -> None:
        record.change_foreign(foreign)
        self.foreign_bytes += record.size_bytes if foreign else -record.size_bytes

    # ---- evictions

    def begin_evict(self, record: Record, tier: str | None = None) -> None:
        """Begin to evict a record, to `tier` if `tier` has room. If the record is being fetched, wait for the
        fetch first.

        A record is clean if a copy in a slower tier has its bytes. A clean record is written only if the copy
        is in a tier other than `tier`. Keep the record resident in three cases: an operator uses it, or user
        code has resized it, or has shared it with numpy.
        """
        if record.state is State.FETCHING:
            self.end_fetch(record)
        if record.state not in {State.RESIDENT, State.WITHHELD}:
            return
        assert record.evictable and not record.pins, record.name
        storage = record.storage()
        if storage is None or self._keep_if_changed(record, storage):
            return
        self.owner.note_eviction_begun(record)
        pending = None
        if not self.is_clean(record) or self._is_copy_in_other_tier(record, tier):
            record.wrote()
            try:
                start = self._write_starter_for_tier(record, tier or record.copy_tier or HOST)
                if record.block is None:
                    pending = self.device.begin_copy_out(storage, start)
                else:
                    pending = self.device.begin_copy_out_of_block(record.block, start)
            except InUseError:
                return
            if self.recorder is not None:
                self.recorder.note_move_begin(record, evict=True)
        record.evicting(pending)

    def is_clean(self, record: Record) -> bool:
        """Return whether the record's copy has the same bytes as the record. If the observer has detected a
        write since the copy, return False."""
        observer = self.device.observer
        if record.clean and observer is not None and observer.is_written_since_copy(record.key):
            record.wrote()
        return record.clean

    def is_address_taken(self, record: Record) -> bool:
        """Return whether user code has taken the address of the record's memory in this step."""
        return self.device.observer is not None and self.device.observer.is_address_taken(record.key)

    def mark_host_copy_clean(self, record: Record) -> None:
        """Mark a resident record as clean, because its place in host memory now has the same bytes."""
        self._release_extent(record)
        record.leave_file()
        record.copied()
        if self.device.observer is not None and (storage := record.storage()) is not None:
            try:
                self.device.observer.watch_for_writes(storage)
            except InUseError:  # an operator uses the storage now, and may write to it
                record.wrote()

    def _is_copy_in_other_tier(self, record: Record, tier: str | None) -> bool:
        """Return whether the record's copy is in a tier other than `tier`. The file from which a weight was
        loaded counts as a copy on the SSD."""
        return (
            self.host is not None and tier is not None and record.copy_tier != (HOST if tier == HOST else SSD)
        )

    def _write_starter_for_tier(self, record: Record, tier: str) -> Start:
        """Reserve room for a copy of the record, and return the function that starts the write.

        Reserve the room in `tier`, or on the SSD if `tier` has no room. Release the room of an older copy in
        another tier.
        """
        record.leave_file()
        if tier == HOST and self.host is not None and self.reserve_host_place(record):
            self._release_extent(record)
            self.counts.to_host_bytes += record.size_bytes
            return self.host.copy_out_starter(record.place)
        self._release_place(record)
        if record.extent is None:
            record.reserve_extent(self.store.reserve(record.size_bytes, record.name))
        extent = record.extent
        assert extent is not None
        return lambda s, mark: self.store.write(extent, s.data_ptr(), record.name, event=mark.handle)

    def reserve_host_place(self, record: Record) -> bool:
        """Reserve a place in host memory for a resident record, unless it has a place. Return whether the
        record has a place now."""
        if record.place is None and self.host is not None:
            place = self._reserve_or_reclaim_place(self.host, record)
            if place is not None:
                record.reserve_place(place)
                self.in_host[record.key] = record
        return record.place is not None

    def _reserve_or_reclaim_place(self, host: Host, record: Record) -> Any:
        """Reserve a place in host memory. If no place is free, release places that resident records have.

        Release places whose copy is stale. If the plan evicts this record to the host, also release places of
        records that the plan does not evict to the host.
        """
        place = host.reserve(record.size_bytes)
        if place is None:
            planned = record.name in self.to_host
            for other in list(self.in_host.values()):
                worse = not other.clean or (planned and other.name not in self.to_host)
                if other.state is State.RESIDENT and worse and not other.pins:
                    self._release_place(other)
                    other.wrote()
                    if (place := host.reserve(record.size_bytes)) is not None:
                        break
        return place

    def _release_extent(self, record: Record) -> None:
        if (extent := record.release_extent()) is not None:
            self.store.release(extent)

    def _release_place(self, record: Record) -> None:
        if (place := record.release_place()) is not None:
            assert self.host is not None
            self.host.release(place)
            del self.in_host[record.key]

    def end_evict(self, record: Record) -> None:
        """Wait for the write of an eviction in flight, and free the storage's memory.

        If the write failed, keep the record resident and raise StoreError.
        """
        if record.state is not State.EVICTING:
            return
        # The record counts as resident until its storage is freed. It remains resident if the write fails.
        pending = record.resident()
        record.copied()  # if code wrote the storage during the copy, the observer has detected the write
        try:
            with _MoveInProgress(self, record):
                self._free_after_copy_or_drop(record, pending)
                record.evicted()
        except NotEvicted:
            return
        except BaseException:
            if pending is not None:
                record.wrote()
            raise
        self.subtract_resident_bytes(record)

    def _keep_if_changed(self, record: Record, storage: Any) -> bool:
        """Keep the record resident if user code has resized its storage, or shared the storage with numpy.
        Return whether the record is kept resident for this reason."""
        if self._recount_if_user_resized(record, storage):
            return True
        if not is_resizable(storage):
            self.owner.keep_unresizable(record)
            return True
        return False

    def _recount_if_user_resized(self, record: Record, storage: Any) -> bool:
        """Return whether user code has resized the storage. If so, count the storage with its new size, and
        keep it resident."""
        if storage.nbytes() == record.size_bytes:
            return False
        self.owner.recount_resized(record, storage.nbytes())
        return True

    def _free_after_copy_or_drop(self, record: Record, pending: Pending | None) -> None:
        """Free the storage's memory. If a copy is in flight, wait for the copy first. If `pending` is None,
        the record was clean, and there is no copy to wait for."""
        if record.block is not None:
            self._free_block_after_copy_or_drop(record, pending)
            return
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

    def _free_block_after_copy_or_drop(self, record: Record, pending: Pending | None) -> None:
        """Free the memory of a withheld record, like `_free_after_copy_or_drop`."""
        if pending is not None:
            self._end_copy_counting_stall(self.device.end_copy_without_freeing, record, pending)
        self.device.free_block(record.block)
        self.counts.add(evictions=pending is not None, drops=pending is None)
        if pending is None and self.recorder is not None:
            self.recorder.note_drop(record)

    def undo_evict(self, record: Record) -> None:
        """Undo an eviction in flight, so that the record is resident. If the write succeeds, the record is
        clean."""
        assert record.state is State.EVICTING, record.name
        pending = record.resident()
        if pending is not None:
            try:
                self._end_copy_counting_stall(self.device.end_copy_without_freeing, record, pending)
                record.copied()
            except StoreError as error:
                self.owner.note_failed_eviction(record, error)

    # ---- fetches

    def begin_fetch(
        self,
        record: Record,
        demand: bool = False,
        make_room: Callable[[Record, BaseException], object] | None = None,
    ) -> None:
        """Begin to fetch an evicted record. If `demand` is True, the fetch overtakes prefetches.

        If the device has no memory for the record, call `make_room`, and try one more time.
        """
        storage = record.storage()
        if storage is None:
            return
        assert record.state is State.EVICTED and record.copy_tier is not None, record.name
        try:
            with _MoveInProgress(self, record):
                start = self._read_starter_of_copy(record, demand)
                record.fetching(self.device.begin_copy_in(storage, record.size_bytes, start))
        except OUT_OF_MEMORY as error:
            if make_room is None:
                raise
            make_room(record, error)
            self.begin_fetch(record, demand)
            return
        self.add_resident_bytes(record)
        self.counts.fetches += 1
        self.counts.from_host_bytes += record.size_bytes if record.copy_tier == HOST else 0
        self.file_bytes += 0 if record.source is None else record.size_bytes
        if self.recorder is not None:
            self.recorder.note_move_begin(record, evict=False, demand=demand)

    def _read_starter_of_copy(self, record: Record, demand: bool) -> Start:
        """Return the function that starts the read of the record's copy, from the tier that has the copy."""
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
        """Wait for the read of a fetch. If the read failed, mark the record as evicted, so that no code uses
        wrong bytes, and raise the error."""
        assert record.state is State.FETCHING and record.pending is not None, record.name
        try:
            with _MoveInProgress(self, record):
                foreign = self._end_copy_counting_stall(self._copy_in_end(record), record, record.pending)
        except Exception:
            record.fetch_failed()
            self.subtract_resident_bytes(record)
            raise
        if foreign:
            self.add_foreign_bytes(record)
        record.resident()

    def _copy_in_end(self, record: Record) -> Callable[[Pending], bool]:
        """Return the function that ends the copy of this record's fetch. If an update of the tensor is owed,
        this function leaves the bytes in the block of the fetch."""
        if record.owed is None:
            return self.device.end_copy_in

        def end_and_withhold(pending: Pending) -> bool:
            self.device.end_copy_in_to_block(pending)
            record.withhold(pending.block)
            return False

        return end_and_withhold

    def end_move(self, record: Record) -> None:
        """Undo an eviction in flight, or wait for a fetch in flight. The record is then resident."""
        if record.state is State.EVICTING:
            self.undo_evict(record)
        elif record.state is State.FETCHING:
            self.end_fetch(record)

    # ---- withheld records

    def withhold(self, record: Record) -> bool:
        """Move the bytes of a record whose update is owed into a block. Return False if code uses the storage
        now.

        Bytes that are not on the device need nothing: the observer detects each read of them, and
        `end_fetch` leaves fetched bytes in a block.
        """
        if record.state in {State.EVICTED, State.FETCHING} or record.block is not None:
            return True
        storage = record.storage()
        if storage is None or self._keep_if_changed(record, storage):
            return False
        self.is_clean(record)  # this notes the writes so far; the observer then forgets them
        if record.state is State.EVICTING and record.pending is None and not record.clean:
            self.undo_evict(record)
        try:
            block = self.device.withhold_bytes(storage, unwritten=record.pending is not None)
        except NotEvicted:
            return False
        record.withhold(block)
        return True

    def reveal(self, record: Record) -> None:
        """Give a withheld record's bytes back to its storage. The record is then resident."""
        storage, block = record.storage(), record.reveal()
        if storage is None:
            self.device.free_block(block)
        elif self.device.return_bytes(storage, block):
            self.add_foreign_bytes(record)

    def discard(self, record: Record) -> None:
        """Free the bytes of a withheld record, and its copy, because nobody may read them again."""
        assert record.state is State.WITHHELD, record.name
        self.device.free_block(record.block)
        record.discarded()
        self.subtract_resident_bytes(record)
        record.leave_file()
        self._release_extent(record)
        self._release_place(record)

    # ---- bytes from a file, and NaN in place of lost bytes

    def replace_bytes_by_file(self, record: Record, source: FileCopy) -> None:
        """Replace the record's bytes by the bytes of this file. The record is then evicted, with the file as
        its copy."""
        assert record.evictable and not record.pins, record.name
        self.end_move(record)
        storage = record.storage()
        if record.state is State.RESIDENT and storage is not None:
            self.device.drop_bytes(storage, unwritten=False)
            self.subtract_resident_bytes(record)
            record.evicted()
        self._release_extent(record)
        self._release_place(record)
        record.copied_in_file(source)

    def fill_with_nan(self, record: Record) -> None:
        """Make a record resident whose bytes are lost, and fill it with NaN. A read of its empty storage
        would crash the process.

        All bits are set, which is NaN in every floating-point type. So user code notices the loss.
        """
        assert record.state is State.EVICTED, record.name
        storage, observer = record.storage(), self.device.observer
        if storage is not None:
            block = storage if observer is None else observer.make_empty_block(storage)
            block.resize_(record.size_bytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(block).fill_(0xFF)
            if observer is not None:
                observer.give_block_to_storage(storage, block)
        record.resident()
        record.wrote()
        self.add_resident_bytes(record)

    def _end_copy_counting_stall(
        self, end: Callable[[Pending], Ended], record: Record, pending: Pending
    ) -> Ended:
        """Call `end`, the method of the device that ends this copy. Count the time of the call as a stall."""
        began_ns = time.perf_counter_ns()
        try:
            return end(pending)
        finally:
            waited_ns = time.perf_counter_ns() - began_ns
            self.counts.stall_ns += waited_ns
            if self.recorder is not None:
                self.recorder.note_move_end(record, pending.ticket, waited_ns)

    def forget(self, record: Record) -> None:
        """Forget a record whose last tensor is freed, and release the room of the record's copy."""
        assert record.pending is None and record.state is not State.FETCHING, record.name
        if record.state is not State.EVICTED:
            self.subtract_resident_bytes(record)
        self._release_extent(record)
        self._release_place(record)
        if self.device.observer is not None:
            self.device.observer.forget_storage(record.key, alive=not record.is_dead())
        record.release_weak_reference()
