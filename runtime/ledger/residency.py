"""The rule of residency: before a kernel runs, all tensors that it reads or writes are resident. They fit in
the budget:

    bytes of resident records
  + bytes that the kernel's program holds outside of records
  + reserve                                                     <= budget

In: records that a kernel or user code needs. Out: these records are resident.

To make room, this module evicts the records whose next use is furthest. The order of kernels in the last step
gives the next uses. If this order is not known, it evicts the least recently used records. Some records may
not move (results, inputs, a few gradients and states). They are kept resident, and their bytes count.

This module reads no plan. It raises BudgetError if the tensors that must be resident together do not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple, NoReturn

import torch

from teraio.errors import BudgetError, StoreError, TeraioError, TornStepError
from teraio.units import fmt_bytes

from ..device.device import OUT_OF_MEMORY, Device, Host
from ..store.store import Store
from .expected_uses import ExpectedUses
from .keep_option import KeepOption
from .mover import Mover
from .owed_tensors import OwedTensors
from .pending_evictions import PendingEvictions
from .record import Record, State, use_records
from .resident_reasons import name_largest_resident, unmet_need_text
from .shards import local_tensor
from .unresizable import Unresizable

log = logging.getLogger("teraio")

VICTIMS_MOST = 64  # records smaller than 1/64 of the missing bytes are evicted last

Keep = Callable[[Record], bool]


class Need(NamedTuple):
    """The bytes that a kernel needs on the device when all other tensors are evicted."""

    fixed_bytes: int  # bytes that cannot move
    kernel_bytes: int  # bytes that can move, and that the kernel reads, writes or makes
    kernel: str

    @property
    def size_bytes(self) -> int:
        """Return the sum of the fixed bytes and the kernel's bytes."""
        return self.fixed_bytes + self.kernel_bytes


NOTHING = Need(0, 0, "")


class Residency:
    """The ledger of one engine: the records of tensors, the budget, and the choice of records to evict."""

    def __init__(
        self,
        store: Store,
        device: Device,
        budget_bytes: int,
        reserve_bytes: int,
        host: Host | None = None,
        keep: KeepOption | None = None,
    ) -> None:
        self.mover = Mover(store, device, self, host)
        self.owed_tensors = OwedTensors(self.mover, self.records_of_storages)
        self.keep = keep or KeepOption()
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.kept_bytes = 0  # part of the reserve: for tensors that user code holds while a program runs
        self.elastic = False  # True for memory="min": the budget grows to the need of the largest kernel
        self.records: dict[int, Record] = {}  # storage key -> record
        self.by_name: dict[str, Record] = {}
        self.mortal: dict[int, Record] = {}  # records of tensors that do not outlive the step
        self.reachable: dict[int, Record] = {}  # evictable records whose tensors user code may read or write
        self.pending_evictions = PendingEvictions(self.in_use, self.try_end_evict)
        self.unresizable = Unresizable(self, self.keep.covers)
        self.serial = 1  # number of the current slot; a record with this number in `used_at` is in use
        self.fixed_bytes = 0  # sum of the bytes of records that cannot move
        self.expected_uses = ExpectedUses()
        self.largest = NOTHING  # the largest need of all kernels of the programs that have run
        # Records whose writes failed in this step. They are not evicted again before the step ends.
        self.failed: dict[int, Record] = {}
        # Keys of storages that could not be evicted, because an operator used them.
        self.refused: set[int] = set()
        # The error by which weights or states were lost. None if the model is whole.
        self.torn: TeraioError | None = None
        self.torn_is_known = False  # True: an error has reported the loss to the user
        # True: a warning has reported that the device has less free memory than the budget allows.
        self.short_memory_is_known = False

    # ---- slots, steps, losses

    def advance_slot(self) -> int:
        """Begin the next slot, and return its number. No record of the previous slot is in use any more."""
        self.serial += 1
        return self.serial

    def begin_step(self) -> None:
        """Begin a step. Records whose writes failed in the last step may be evicted again."""
        self.advance_slot()
        self.pending_evictions.end_evictions_already_written()
        self.failed.clear()
        self.forget_dead_records()

    def declare_loss(self, error: TeraioError, known: bool = False) -> None:
        """Record that weights or states were lost. `known` is True if an error reports this loss to the user.

        After several losses, keep the last error with `known`. If there is none, keep the first error.
        """
        if self.torn is None or known:
            self.torn = error
        self.torn_is_known = self.torn_is_known or known

    # ---- the budget

    def set_budget(self, budget_bytes: int | None) -> None:
        """Change the budget. None means the smallest budget that the kernels of known programs need. This
        method evicts nothing, so the caller must then evict records until the resident bytes fit.

        If one of these kernels needs more than the budget, change nothing and raise BudgetError.
        """
        before, elastic = self.budget_bytes, self.elastic
        self.elastic = budget_bytes is None
        self.budget_bytes = self.reserve_bytes if budget_bytes is None else budget_bytes
        if self.is_over_budget(self.largest):
            try:
                self.refuse_or_grow_budget(self.largest)
            except TeraioError:
                self.budget_bytes, self.elastic = before, elastic
                raise

    def grow_budget_to(self, budget_bytes: int) -> None:
        """Raise the budget to this size, if the budget is smaller."""
        self.budget_bytes = max(self.budget_bytes, budget_bytes)

    def grow_reserve_to(self, reserve_bytes: int) -> bool:
        """Raise the reserve to this size, if the reserve is smaller. If the budget is elastic, raise the
        budget by the same number of bytes. Return whether the reserve grew."""
        more = reserve_bytes - self.reserve_bytes
        if more > 0:
            self.reserve_bytes += more
            self.budget_bytes += more if self.elastic else 0
        return more > 0

    def set_reserve(self, reserve_bytes: int) -> None:
        """Set the reserve, and leave the budget unchanged."""
        self.reserve_bytes = reserve_bytes

    def reserve_for_user_code(self, kept_bytes: int) -> None:
        """Change the part of the reserve for tensors that user code holds while a program runs."""
        self.reserve_bytes += kept_bytes - self.kept_bytes
        self.kept_bytes = kept_bytes

    def report_overrun(self, short: int, place: str, who: str = "user code") -> None:
        """Count and report bytes that `who` gets beyond the budget. An elastic budget is raised instead."""
        if self.elastic:
            self.budget_bytes += short
            return
        # Warn only if this overrun is more than twice the largest overrun so far, and not for each tensor.
        if short > 2 * self.mover.counts.overrun_bytes:
            log.warning(
                "teraio: overrun: %s (%s) needs %s more than the memory of %s; the budget is exceeded",
                who,
                place,
                fmt_bytes(short, up=True),
                fmt_bytes(self.budget_bytes),
            )
        self.mover.counts.note_overrun(short)
        if self.mover.recorder is not None:
            self.mover.recorder.note_overrun(short)

    def note_peak(self, extra_bytes: int) -> None:
        """Raise the peak to the bytes in use now, if the peak is lower. These are the resident bytes, plus
        `extra_bytes` outside of records."""
        self.mover.counts.note_peak(self.mover.resident_bytes + extra_bytes)

    # ---- records

    def add_record_of_storage(
        self, storage: torch.UntypedStorage, name: str, kind: str, evictable: bool
    ) -> Record:
        """Make a record for a storage whose bytes are on the device, and add the record to the ledger."""
        record = Record(storage, name, kind, evictable)
        self.records[record.key] = record
        if not record.persistent:
            self.mortal[record.key] = record
        self.by_name[name] = record
        self.mover.add_resident_bytes(record)
        if self.mover.device.is_uncounted_in_used_bytes(storage):
            self.mover.add_foreign_bytes(record)
        self.fixed_bytes += 0 if evictable else record.size_bytes
        return record

    def evictable_record_of(self, tensor: torch.Tensor) -> Record | None:
        """Return the record of the tensor's storage, if the record may be evicted. Otherwise return None."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            key = torch.Tensor.untyped_storage(local_tensor(tensor))._cdata
        record = self.records.get(key)
        return record if record is not None and record.evictable else None

    def records_of_storages(self, keys: Iterable[int]) -> list[Record]:
        """Return the records of the storages with these keys. Ignore storages without a record."""
        return [record for key in keys if (record := self.records.get(key)) is not None]

    def forbid_eviction(self, record: Record) -> None:
        """Keep the record resident from now on, and count its bytes as fixed."""
        if record.evictable:
            record.forbid_eviction()
            self.fixed_bytes += record.size_bytes
            self.reachable.pop(record.key, None)

    def allow_eviction(self, record: Record) -> None:
        """Allow the eviction of the record, and record that user code may read or write its tensor.

        Do nothing if user code or a library has the storage's address and will not give it up.
        """
        if record.addressed:
            return
        if not record.evictable:
            record.allow_eviction()
            self.fixed_bytes -= record.size_bytes
        self.make_reachable(record)

    def make_reachable(self, record: Record) -> None:
        """Record that user code may read or write the tensor of this evictable record."""
        assert record.evictable, record.name
        self.reachable[record.key] = record

    def forbid_eviction_for_good(self, record: Record, because: str) -> None:
        """Keep the record resident for good, for this reason. A later `allow_eviction` has no effect."""
        self.forbid_eviction(record)
        record.note_address_kept(because)

    def recount_resized(self, record: Record, size_bytes: int) -> None:
        """Change the record's size, because user code has resized the storage. Keep the record resident for
        good."""
        self.forbid_eviction_for_good(record, "your code gave its storage another size")
        self.mover.subtract_resident_bytes(record)
        self.fixed_bytes += size_bytes - record.size_bytes
        record.resize(size_bytes)
        self.mover.add_resident_bytes(record)

    def change_kind(self, record: Record, kind: str, persistent: bool | None = None) -> None:
        """Change the record's kind and, if `persistent` is given, whether the tensor outlives the step."""
        record.become(kind, record.persistent if persistent is None else persistent)
        if self.mover.recorder is not None:
            self.mover.recorder.note_kind_change(record)

    def rename(self, record: Record, name: str) -> None:
        """Change the record's name, also in `by_name`."""
        if self.by_name.get(record.name) is record:
            del self.by_name[record.name]
        record.rename(name)
        self.by_name[name] = record

    def forget_names_of_step(self) -> None:
        """Forget the names that belong to this step. The next step gives these names to new records."""
        self.by_name = {
            name: record
            for name, record in self.by_name.items()
            if record.persistent or record.owed is not None
        }

    # ---- the law

    def make_resident_within_budget(
        self, needed: Sequence[Record], live_bytes: int, kernel: str, tick: int | None, late: bool = False
    ) -> None:
        """Make the records in `needed` resident, with room for `live_bytes` outside of records. Raise
        BudgetError if they do not fit together.

        If an update of a record is owed, first run the update. With `late`, the kernel is this update, and
        the record's bytes remain withheld.
        """
        missing = 0
        if not late:
            self.owed_tensors.settle_records(needed, kernel)
        use_records(needed, self.serial)
        for record in needed:
            if record.state is State.EVICTING:
                self.mover.undo_evict(record)
            elif record.state is State.EVICTED:
                missing += record.size_bytes
        short, failure = self.evict_until_fits(missing + live_bytes, tick)
        if short > 0:
            self._raise_or_grow_budget(missing + live_bytes, kernel, failure)
        self.fetch(needed)
        self.note_peak(live_bytes)

    def fetch(self, needed: Iterable[Record], keep: Keep | None = None) -> None:
        """Fetch these records. The caller has made room for them in the budget.

        The device may still have too little free memory. In this case evict all other records that may move,
        except records for which `keep` returns True.
        """
        for record in needed:
            if record.state is State.EVICTED:
                self.mover.counts.add(misses=1)
                self.mover.begin_fetch(
                    record, demand=True, make_room=lambda r, error: self.evict_for_device(r, error, keep)
                )
        for record in needed:
            if record.state is State.FETCHING:
                self.mover.end_fetch(record)
        self.owed_tensors.reveal(record for record in needed if record.owed is None)

    def fetch_ahead_if_memory(self, record: Record) -> bool:
        """Begin to fetch a record before its use. Return False if the device has no memory for it now."""
        try:
            self.mover.begin_fetch(record)
        except OUT_OF_MEMORY as error:
            self._warn_of_short_device(record, error)
            return False
        return True

    def evict_for_device(self, record: Record, error: BaseException, keep: Keep | None = None) -> None:
        """Evict every other record that may move, because the device has no memory for `record`. Do not evict
        records for which `keep` returns True."""
        self._warn_of_short_device(record, error)
        self.refused.clear()
        others = [other for other in self._eviction_candidates() if keep is None or not keep(other)]
        for other in others:
            self.try_evict(other)
        for other in others:
            self.try_end_evict(other)

    def _warn_of_short_device(self, record: Record, error: BaseException) -> None:
        error.with_traceback(None)  # drop the traceback: its frames would keep tensors alive
        if not self.short_memory_is_known:
            self.short_memory_is_known = True
            log.warning(
                "teraio: the device has no memory for %s (%s), although no more than %s of the budget are in "
                "use: something beside teraio takes it. A smaller memory= leaves more for that. Meanwhile "
                "fetches ahead wait, and a fetch on demand evicts everything else",
                record.name,
                fmt_bytes(record.size_bytes),
                fmt_bytes(self.mover.resident_bytes, up=True),
            )

    def limit_allocator_cache(self) -> None:
        """Let the allocator keep freed memory for later tensors. Tensors and kept memory together may fill
        the budget without the reserve. Release kept memory that no tensor has used lately."""
        room_bytes = self.budget_bytes - self.reserve_bytes + self.kept_bytes - self.mover.foreign_bytes
        self.mover.device.limit_tensors_and_spare_memory(room_bytes)
        self.mover.device.release_unused_spare_memory()

    def short_bytes(self, extra_bytes: int) -> int:
        """Return how many bytes must become free so that `extra_bytes` fit. At most 0 if they fit now."""
        return self.mover.resident_bytes + extra_bytes + self.reserve_bytes - self.budget_bytes

    def fits(self, extra_bytes: int) -> bool:
        """Return whether `extra_bytes` more fit in the budget. If they seem not to fit, first forget records
        whose tensors are freed."""
        if self.short_bytes(extra_bytes) > 0:
            self.forget_dead_records(self.mortal)
        return self.short_bytes(extra_bytes) <= 0

    def try_room_by_planned_evictions(self, extra_bytes: int, tick: int | None) -> bool:
        """Try to make room for a planned fetch of `extra_bytes`. Return whether the bytes fit in the budget.

        (1) End evictions whose bytes the plan already counts as free, if these bytes are enough. (2) If not,
        begin to evict gradients that this step does not read again. Most of them have a clean copy, and their
        bytes are free immediately. For the others a write begins, and their bytes are free at a later slot.
        """
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
            if self.try_evict(record):
                short -= record.size_bytes
                self.pending_evictions.add(record)
        self.pending_evictions.end_evictions_already_written()
        return self.fits(extra_bytes)

    def _spent_gradients(self, tick: int | None) -> list[Record]:
        resident = (r for r in self.mortal.values() if r.kind == "grad" and r.state is State.RESIDENT)
        idle = (r for r in resident if r.evictable and not (self.in_use(r) or r.key in self.failed))
        return [r for r in idle if self.next_use(r, tick) == (1, inf)]

    def _raise_or_grow_budget(self, extra_bytes: int, kernel: str, failure: StoreError | None) -> None:
        """Raise an error, because a kernel does not fit in the budget. If the budget is elastic, and no write
        failed, raise the budget instead."""
        if failure is not None:
            raise failure
        used_bytes = sum(record.size_bytes for record in self.records_of_storages(self.refused))
        self.refuse_or_grow_budget(Need(self.mover.resident_bytes, extra_bytes, kernel), used_bytes)

    def evict_until_fits(
        self, extra_bytes: int, tick: float | None, keep: Keep | None = None
    ) -> tuple[int, StoreError | None]:
        """Evict records until `extra_bytes` more fit in the budget. Do not evict records for which `keep`
        returns True.

        Return the number of bytes that are still missing. Also return the error of the last write that
        failed, or None.
        """
        if self.fits(extra_bytes):
            return 0, None
        self.refused.clear()
        failure = self.pending_evictions.end_evictions_until_enough(
            lambda: self.short_bytes(extra_bytes) <= 0
        )
        while (short := self.short_bytes(extra_bytes)) > 0:
            victims = self.victims(short, tick, keep)
            if not victims and not self.unresizable.make_newly_unresizable_evictable():
                return short, failure
            # Begin all writes before the first wait, so that the writes overlap.
            for move in (self.mover.begin_evict, self.mover.end_evict):
                for record in victims:
                    try:
                        move(record)
                    except StoreError as error:
                        failure = self.note_failed_eviction(record, error)
            self.refused.update(r.key for r in victims if r.state is State.RESIDENT)
            # A fetch that ended just now may have been the last user of its storage.
            self.forget_dead_records()
        return 0, failure

    def victims(self, short: int, tick: float | None, keep: Keep | None) -> list[Record]:
        """Choose records to evict until their sizes add up to `short` bytes, the furthest next use first.

        Records much smaller than `short` are chosen last. The eviction of such a record costs a transfer, and
        frees almost nothing.
        """
        least_bytes = short // VICTIMS_MOST

        def counts_then_use(record: Record) -> tuple[bool, int, float]:
            return (record.size_bytes >= least_bytes, *self.next_use(record, tick))

        victims: list[Record] = []
        for record in sorted(self._eviction_candidates(), key=counts_then_use, reverse=True):
            if short <= 0:
                break
            if keep is None or not keep(record):
                victims.append(record)
                short -= record.size_bytes
        return victims

    def try_evict(self, record: Record, tier: str | None = None) -> bool:
        """Begin to evict a resident record, to `tier` if `tier` has room.

        Return whether the eviction has begun. It does not begin if the store refuses the write, or if an
        operator uses the record.
        """
        try:
            self.mover.begin_evict(record, tier)
        except StoreError as error:
            self.note_failed_eviction(record, error)
        return record.state is State.EVICTING

    def try_end_evict(self, record: Record) -> StoreError | None:
        """Wait for an eviction in flight, and free its bytes. Return the error of a failed write, or None."""
        try:
            self.mover.end_evict(record)
        except StoreError as error:
            return self.note_failed_eviction(record, error)
        return None

    # ---- reports of the mover

    def note_eviction_begun(self, record: Record) -> None:
        """Forget the record's entry in `pending_evictions`, because a new eviction of the record begins."""
        self.pending_evictions.forget(record)

    def keep_unresizable(self, record: Record) -> None:
        """Keep a record resident, because user code has shared its storage with numpy. Later, the storage may
        get new memory (adoption), and may then be evicted again."""
        self.forbid_eviction(record)
        self.unresizable.add_fresh(record)

    def note_failed_eviction(self, record: Record, error: StoreError) -> StoreError:
        """Keep a record resident until the step ends, because the write of its bytes to the store failed."""
        if not self.failed:
            log.warning("teraio: %s is kept resident, others are evicted instead: %s", record.name, error)
        error.with_traceback(None)  # drop the traceback: its frames would keep tensors alive
        self.failed[record.key] = record
        self.mover.counts.add(failed_moves=1)
        return error

    # ---- choice of the records to evict

    def in_use(self, record: Record) -> bool:
        """Return whether the current slot or user code uses the record now."""
        return record.used_at == self.serial or record.pins > 0

    def _eviction_candidates(self) -> list[Record]:
        return [
            record
            for record in self.records.values()
            if record.evictable
            and record.state is not State.EVICTED
            and not self.in_use(record)
            and record.key not in self.failed
            and record.key not in self.refused
        ]

    def next_use(self, record: Record, tick: float | None) -> tuple[int, float]:
        """Return a sort key (`ExpectedUses.next_use`). Records with larger keys are evicted first."""
        return self.expected_uses.next_use(record, tick)

    def is_over_budget(self, need: Need) -> bool:
        """Return whether the need of a kernel, plus the reserve, exceeds the budget."""
        return need.size_bytes + self.reserve_bytes > self.budget_bytes

    def refuse_or_grow_budget(self, need: Need, used_bytes: int = 0) -> None:
        """Raise BudgetError, because the need of a kernel does not fit. If the budget is elastic, raise the
        budget to the need instead.

        The need may not fit only because of bytes that user code holds or uses now. In this case only report
        an overrun.
        """
        short = need.size_bytes + self.reserve_bytes - self.budget_bytes
        if 0 < short <= self.kept_bytes + used_bytes:
            self.report_overrun(short, f"kernel {need.kernel}, beside what user code keeps")
            self.reserve_for_user_code(max(0, self.kept_bytes - short))
            return
        self.reserve_for_user_code(0)
        if not self.elastic:
            self.raise_budget_error(need)
        self.grow_budget_to(need.size_bytes + self.reserve_bytes)

    def note_largest_need(self, need: Need) -> None:
        """Record the need of a program's largest kernel. Every later budget must have room for this need."""
        self.largest = max(self.largest, need, key=lambda n: n.size_bytes)

    def raise_budget_error(self, need: Need) -> NoReturn:
        """Raise BudgetError for the largest need so far. The error names the largest tensors that cannot be
        evicted."""
        need = max(need, self.largest, key=lambda n: n.size_bytes)
        used = {r.key for r in self.records.values() if r.used_at == self.serial}
        names = name_largest_resident(self._unevictable_records(), used, self.mover.is_address_taken)
        raise BudgetError(unmet_need_text(*need, self.reserve_bytes, self.budget_bytes, names))

    def _unevictable_records(self) -> list[Record]:
        """Return the records that cannot be evicted now, without records whose tensors are freed."""
        self.forget_dead_records()
        return [
            r
            for r in self.records.values()
            if not r.evictable or r.pins > 0 or self.mover.is_address_taken(r)
        ]

    def raise_torn_step_error(self) -> NoReturn:
        """Raise TornStepError, because the model has lost weights or states."""
        self.torn_is_known = True
        raise TornStepError(
            f"weights or optimizer states were lost ({self.torn}). Tensors that could not be read are NaN "
            f"now. Load the last checkpoint, after teraio.reset()"
        ) from self.torn

    def forget_dead_records(self, among: dict[int, Record] | None = None) -> None:
        """Forget the records whose last tensor is freed. If `among` is given, look only at its records."""
        expired = torch.UntypedStorage._expired
        records = self.records if among is None else among
        dead = [r for r in records.values() if expired(r.weak) and r.pending is None]
        if dead:
            self._forget(dead)

    def dead_resident_bytes(self) -> int:
        """Return the bytes that still count as resident although the last tensor of their record is freed."""
        records = list(self.records.values())
        return sum(r.size_bytes for r in records if r.state is not State.EVICTED and r.is_dead())

    def _forget(self, dead: list[Record]) -> None:
        for record in dead:
            self.mover.forget(record)
            self.fixed_bytes -= 0 if record.evictable else record.size_bytes
            key = record.key
            del self.records[key]
            self.mortal.pop(key, None)
            self.reachable.pop(key, None)
            if self.by_name.get(record.name) is record:
                del self.by_name[record.name]
