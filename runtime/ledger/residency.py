"""The law: before a kernel runs, everything it touches is resident, and it fits the budget. No plan is asked.

    bytes of records on the device
  + bytes that the kernel's program holds and no one registers
  + reserve                                       <= budget

If that does not hold, tensors leave by furthest next use: by the order of the last step where it is known,
else by least recent use. Records that never move (results, gradients, states, inputs) count and stay.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple, NoReturn

import torch

from teraio.errors import BudgetError, StoreError, TeraioError, TornStepError
from teraio.units import fmt_bytes

from .adoption import is_resizable
from .device_shortage import DeviceShortage
from .mover import Mover
from .pending_evictions import PendingEvictions
from .record import Record, State
from .resident_reasons import name_largest_resident

log = logging.getLogger("teraio")

VICTIMS_MOST = 64  # that make up for what is missing, where there are any as large


class Need(NamedTuple):
    """What must be in memory at once at a kernel, whatever leaves."""

    stays_bytes: int  # cannot move
    kernel_bytes: int  # movable, touched by the kernel, or made by it
    kernel: str

    @property
    def size_bytes(self) -> int:
        return self.stays_bytes + self.kernel_bytes


NOTHING = Need(0, 0, "")


class Residency:
    def __init__(self, mover: Mover, budget_bytes: int, reserve_bytes: int) -> None:
        self.mover = mover
        mover.not_written, mover.resized = self.note_failed_eviction, self.recount_resized
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.kept_bytes = 0  # of these: what user code has while a program runs
        self.overrun: Callable[[int, str], None] = lambda short, place: None
        self.elastic = False  # memory is `min`: the budget grows to what a kernel needs when all else is away
        self.records: dict[int, Record] = {}  # storage address -> record
        self.by_name: dict[str, Record] = {}
        self.mortal: dict[int, Record] = {}  # of those, what does not live from step to step
        self.reachable: dict[int, Record] = {}  # what can move, and user code may touch
        self.pending_evictions = PendingEvictions(
            self.in_use, lambda record: self._begin_or_end_evict(record, begin=False)
        )
        self.shortage = DeviceShortage(mover, self._evict_all)
        self.serial = 1  # of the slot: a record with `used_at` equal to it is in use
        self.fixed_bytes = 0  # of records that never move
        self.uses: dict[str, list[float]] = {}  # name -> ticks of the expected step, ascending
        self.step_ticks = 0  # how many that step has
        self.largest = NOTHING  # of the programs that are known, the most that must be there at once
        self.failed: dict[int, Record] = {}  # could not be written: not tried again in this step
        self.refused: set[int] = set()  # not evicted when that was last tried, because someone uses them
        self.torn: TeraioError | None = None  # why weights and states are not those of a whole step
        self.torn_is_known = False  # to the user: an error said so
        self.immovable: Callable[[Record], None] = lambda record: None  # is told what cannot leave after all
        self.last_resort: Callable[[], bool] = lambda: False  # makes it such that it can

    def add_record_of_storage(
        self, storage: torch.UntypedStorage, name: str, kind: str, evictable: bool
    ) -> Record:
        record = Record(storage, name, kind, evictable)
        record.persistent = kind in {"weight", "state"}
        self.records[record.key] = record
        if not record.persistent:
            self.mortal[record.key] = record
        self.by_name[name] = record
        self.mover.add_resident_bytes(record)
        if self.mover.device.is_uncounted_in_used_bytes(storage):
            record.foreign = True
            self.mover.foreign_bytes += record.size_bytes
        self.fixed_bytes += 0 if evictable else record.size_bytes
        return record

    def evictable_record_of(self, tensor: torch.Tensor) -> Record | None:
        """Its record, if it has bytes that can leave."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            key = torch.Tensor.untyped_storage(tensor)._cdata
        record = self.records.get(key)
        return record if record is not None and record.evictable else None

    def records_of_storages(self, keys: Iterable[int]) -> list[Record]:
        """Return the records of these storages, of those that have one."""
        return [record for key in keys if (record := self.records.get(key)) is not None]

    def forbid_eviction(self, record: Record) -> None:
        """From now on it is someone else's: it counts, and never moves."""
        if record.evictable:
            record.evictable = False
            self.fixed_bytes += record.size_bytes
            self.reachable.pop(record.key, None)

    def allow_eviction(self, record: Record) -> None:
        """Have it move again, unless others have its address."""
        if record.addressed:
            return
        if not record.evictable:
            record.evictable = True
            self.fixed_bytes -= record.size_bytes
        self.reachable[record.key] = record

    def forbid_eviction_for_good(self, record: Record, because: str) -> None:
        """Have it never move again, whatever becomes of it."""
        self.forbid_eviction(record)
        record.addressed, record.because = True, because

    def recount_resized(self, record: Record, size_bytes: int) -> None:
        """Keep what user code gave another size, and count it as what it is."""
        self.forbid_eviction_for_good(record, "your code gave its storage another size")
        self.mover.subtract_resident_bytes(record)
        self.fixed_bytes += size_bytes - record.size_bytes
        record.size_bytes = size_bytes
        self.mover.add_resident_bytes(record)

    def change_kind(self, record: Record, kind: str) -> None:
        """It turned out to be of another kind."""
        record.kind = kind
        if self.mover.recorder is not None:
            self.mover.recorder.note_kind_change(record)

    def rename(self, record: Record, name: str) -> None:
        if self.by_name.get(record.name) is record:
            del self.by_name[record.name]
        record.name = name
        self.by_name[name] = record

    def make_resident_within_budget(
        self, needed: Sequence[Record], live_bytes: int, kernel: str, tick: int | None
    ) -> None:
        """Everything in `needed` is resident, and `live_bytes` more fit, when this returns."""
        missing = 0
        serial = self.serial
        for record in needed:
            record.used_at = serial
            if record.state is State.LEAVING:
                self.mover.undo_evict(record)
            elif record.state is State.AWAY:
                missing += record.size_bytes
        short, failure = self.evict_until_fits(missing + live_bytes, tick)
        if short > 0:
            self._raise_or_grow_budget(missing + live_bytes, kernel, failure)
        self.fetch(needed)
        counts = self.mover.counts
        counts.peak_bytes = max(counts.peak_bytes, self.mover.resident_bytes + live_bytes)

    def mark_written(self, bound: Sequence[Record | None], written: Iterable[int]) -> None:
        """A kernel wrote these: copies of them in the store are old."""
        for buffer in written:
            if (record := bound[buffer]) is not None:
                record.clean = False

    def fetch(self, needed: Iterable[Record], stays: Callable[[Record], bool] | None = None) -> None:
        """These are resident when this returns; room was made before, by the budget. Where the device has
        less, all leave that may, except what `stays`."""
        for record in needed:
            if record.state is State.AWAY:
                self.mover.counts.misses += 1
                self.shortage.begin_fetch_making_room(record, stays, demand=True)
        for record in needed:
            if record.state is State.ARRIVING:
                self.mover.end_fetch(record)

    def limit_allocator_cache(self) -> None:
        """What was freed is kept for others, as far as the budget goes; what a step did not need is not."""
        room_bytes = self.budget_bytes - self.reserve_bytes + self.kept_bytes - self.mover.foreign_bytes
        self.mover.device.limit_tensors_and_spare_memory(room_bytes)
        self.mover.device.release_unused_spare_memory()

    def short_bytes(self, extra_bytes: int) -> int:
        return self.mover.resident_bytes + extra_bytes + self.reserve_bytes - self.budget_bytes

    def fits(self, extra_bytes: int) -> bool:
        if self.short_bytes(extra_bytes) > 0:
            self.forget_dead_records(self.mortal)
        return self.short_bytes(extra_bytes) <= 0

    def try_room_by_planned_evictions(self, extra_bytes: int, tick: int | None) -> bool:
        """Whether so many bytes fit, if need be after what the plan has gone by now, and spent gradients,
        have left: what was to be done with those in this step is done, and plans take them for gone. Most
        have a copy. Of others one is begun, and the room is there at a later slot."""
        if self.fits(extra_bytes):
            return True
        if self.short_bytes(extra_bytes) <= self.pending_evictions.planned_bytes:
            self.pending_evictions.end_evictions_until_enough(
                lambda: self.short_bytes(extra_bytes) <= 0, by_plan=True
            )
        short = self.short_bytes(extra_bytes) - self.pending_evictions.size_bytes
        for record in sorted(self._spent_gradients(tick), key=lambda r: not self.mover.is_clean(r)):
            if short <= 0:
                break
            self._begin_or_end_evict(record, begin=True)
            if record.state is State.LEAVING:
                short -= record.size_bytes
                self.pending_evictions.add(record)
        self.pending_evictions.end_evictions_already_written()
        return self.fits(extra_bytes)

    def _spent_gradients(self, tick: int | None) -> list[Record]:
        there = (r for r in self.mortal.values() if r.kind == "grad" and r.state is State.DEVICE)
        idle = (r for r in there if r.evictable and not (self.in_use(r) or r.key in self.failed))
        return [r for r in idle if self.next_use(r, tick) == (1, inf)]

    def _raise_or_grow_budget(self, extra_bytes: int, kernel: str, failure: StoreError | None) -> None:
        """Raise the error for a kernel that does not fit; or give it more, where the budget may grow."""
        if failure is not None:
            raise failure
        used_bytes = sum(record.size_bytes for record in self.records_of_storages(self.refused))
        self.refuse_or_grow_budget(Need(self.mover.resident_bytes, extra_bytes, kernel), used_bytes)

    def evict_until_fits(
        self, extra_bytes: int, tick: float | None, stays: Callable[[Record], bool] | None = None
    ) -> tuple[int, StoreError | None]:
        """Evicts until so many bytes fit; returns how many are still missing, and what went wrong if
        something did."""
        if self.fits(extra_bytes):
            return 0, None
        self.refused.clear()
        failure = self.pending_evictions.end_evictions_until_enough(
            lambda: self.short_bytes(extra_bytes) <= 0
        )
        while (short := self.short_bytes(extra_bytes)) > 0:
            victims = self.victims(short, tick, stays)
            if not victims and not self.last_resort():
                return short, failure
            failure = self._evict_each(victims) or failure
            self.forget_dead_records()  # a fetch that was the last to hold a dropped tensor
        return 0, failure

    def victims(self, short: int, tick: float | None, stays: Callable[[Record], bool] | None) -> list[Record]:
        """By furthest next use, as many as make up for `short` bytes, or all there are. Those that are next
        to nothing of it come last: a transfer each would be all that they bring."""
        least_bytes = short // VICTIMS_MOST

        def counts_then_use(record: Record) -> tuple[bool, int, float]:
            return (record.size_bytes >= least_bytes, *self.next_use(record, tick))

        victims: list[Record] = []
        for record in sorted(self._eviction_candidates(), key=counts_then_use, reverse=True):
            if short <= 0:
                break
            if stays is None or not stays(record):
                victims.append(record)
                short -= record.size_bytes
        return victims

    def _evict_each(self, victims: Sequence[Record]) -> StoreError | None:
        """Evicts them all at once. What cannot be written stays, and is not tried again in this step."""
        failure: StoreError | None = None
        for begin in (True, False):
            for record in victims:
                failure = self._begin_or_end_evict(record, begin) or failure
        return failure

    def _evict_all(self, stays: Callable[[Record], bool] | None) -> StoreError | None:
        self.refused.clear()
        return self._evict_each(
            [record for record in self._eviction_candidates() if stays is None or not stays(record)]
        )

    def _begin_or_end_evict(self, record: Record, begin: bool) -> StoreError | None:
        try:
            if record.state is State.ARRIVING:
                self.mover.end_fetch(record)
            if begin and record.state is State.DEVICE:
                self.begin_evict_if_resizable(record)
            elif not begin and record.state is State.LEAVING:
                self.mover.end_evict(record)
            if record.state is State.DEVICE:  # someone uses it
                self.refused.add(record.key)
        except StoreError as error:
            return self.note_failed_eviction(record, error)
        return None

    def begin_evict_if_resizable(self, record: Record, tier: str | None = None) -> None:
        """Begin to evict this record, to this tier if it has room. Keep it instead if user code has made it
        immovable a moment ago: an array of numpy's shares the bytes."""
        storage = record.storage()
        if storage is not None and not is_resizable(storage):
            self.forbid_eviction(record)
            self.immovable(record)
        else:
            self.pending_evictions.forget(record)
            self.mover.begin_evict(record, tier)

    def note_failed_eviction(self, record: Record, error: StoreError) -> StoreError:
        """A tensor that the store does not take stays in memory until the step ends."""
        if not self.failed:
            log.warning("teraio: %s stays in memory, others take its place: %s", record.name, error)
        error.with_traceback(None)  # whose frames would keep a program's tensors
        self.failed[record.key] = record
        self.mover.counts.failed_moves += 1
        return error

    def in_use(self, record: Record) -> bool:
        return record.used_at == self.serial or record.pins > 0

    def _eviction_candidates(self) -> list[Record]:
        return [
            record
            for record in self.records.values()
            if record.evictable
            and record.state is not State.AWAY
            and not self.in_use(record)
            and record.key not in self.failed
            and record.key not in self.refused
        ]

    def next_use(self, record: Record, tick: float | None) -> tuple[int, float]:
        """By the last step's order where it is known, else by least recent use (and sooner than all
        known). A gradient that this step is done with is spent: the next step makes another."""
        ticks = self.uses.get(record.name)
        if not ticks or tick is None:
            return (0, -record.used_at)
        at = bisect_right(ticks, tick)
        if at < len(ticks):
            return (1, ticks[at])
        return (1, inf if record.kind == "grad" else ticks[0] + self.step_ticks)

    def is_over_budget(self, need: Need) -> bool:
        return need.size_bytes + self.reserve_bytes > self.budget_bytes

    def reserve_for_user_code(self, kept_bytes: int) -> None:
        """So many bytes of user code are there while the program runs: they are in reserve."""
        self.reserve_bytes += kept_bytes - self.kept_bytes
        self.kept_bytes = kept_bytes

    def refuse_or_grow_budget(self, need: Need, used_bytes: int = 0) -> None:
        """What does not fit is refused, or, if that is how memory was asked for, the budget grows to it. What
        user code holds is no reason for that, nor what it uses at this moment."""
        short = need.size_bytes + self.reserve_bytes - self.budget_bytes
        if 0 < short <= self.kept_bytes + used_bytes:
            self.overrun(short, f"kernel {need.kernel}, beside what user code keeps")
            self.reserve_for_user_code(max(0, self.kept_bytes - short))
            return
        self.reserve_for_user_code(0)
        if not self.elastic:
            self.raise_budget_error(need)
        self.budget_bytes = max(self.budget_bytes, need.size_bytes + self.reserve_bytes)

    def raise_budget_error(self, need: Need) -> NoReturn:
        need = max(need, self.largest, key=lambda n: n.size_bytes)
        need_bytes = need.size_bytes + self.reserve_bytes
        needed, given = fmt_bytes(need_bytes, up=True), fmt_bytes(self.budget_bytes)
        if needed == given:  # a few bytes are missing
            needed, given = f"{need_bytes} bytes", f"{self.budget_bytes} bytes"
        stays, kernel, reserve = map(fmt_bytes, (need.stays_bytes, need.kernel_bytes, self.reserve_bytes))
        used = {r.key for r in self.records.values() if r.used_at == self.serial}
        names = name_largest_resident(self._unevictable_records(), used, self.mover.is_address_taken)
        named = f". The largest that cannot leave: {names}" if names and need.stays_bytes else ""
        raise BudgetError(
            f"the step needs {needed} at kernel {need.kernel} ({stays} that cannot leave, {kernel} that "
            f"the kernel needs, {reserve} in reserve); memory is {given}. Give at least {needed}, more if a "
            f"later kernel needs it, or a smaller batch{named}"
        )

    def _unevictable_records(self) -> list[Record]:
        """Return what no eviction frees."""
        self.forget_dead_records()
        return [
            r
            for r in self.records.values()
            if not r.evictable or r.pins > 0 or self.mover.is_address_taken(r)
        ]

    def raise_torn_step_error(self) -> NoReturn:
        self.torn_is_known = True
        raise TornStepError(
            f"weights or optimizer states were lost ({self.torn}); what could not be read is NaN now, so "
            f"that it cannot be taken for good. Load the last checkpoint, after teraio.reset()"
        ) from self.torn

    def forget_dead_records(self, among: dict[int, Record] | None = None) -> None:
        """Forgets the storages whose last tensor is gone."""
        expired = torch.UntypedStorage._expired
        records = self.records if among is None else among
        gone = [r for r in records.values() if expired(r.weak) and r.pending is None]
        if gone:
            self._forget(gone)

    def dead_resident_bytes(self) -> int:
        """On the device by the count, and gone with their last tensor."""
        records = list(self.records.values())
        return sum(r.size_bytes for r in records if r.state is not State.AWAY and r.is_dead())

    def _forget(self, gone: list[Record]) -> None:
        for record in gone:
            self.mover.forget(record)
            self.fixed_bytes -= 0 if record.evictable else record.size_bytes
            key = record.key
            del self.records[key]
            self.mortal.pop(key, None)
            self.reachable.pop(key, None)
            if self.by_name.get(record.name) is record:
                del self.by_name[record.name]
