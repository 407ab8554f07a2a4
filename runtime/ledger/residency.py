"""The law: before a kernel runs, every tensor that it touches is resident, and all of them fit in the budget.

    bytes of resident records
  + bytes that the kernel's program holds beside records
  + reserve                                       <= budget

In: records that a kernel or user code needs. Out: those records are resident. If bytes are missing, the law
evicts the records with the furthest next use. The order of kernels in the last step gives the next uses.
Where this order is not known, the law evicts the least recently used records. Records that may not move
(results, inputs, a few gradients and states) are kept resident, and their bytes count.

The law reads no plan. It raises BudgetError if the tensors that must be resident together do not fit.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, NoReturn

import torch

from teraio.errors import BudgetError, StoreError, TeraioError, TornStepError
from teraio.units import fmt_bytes

from ..device.device import OUT_OF_MEMORY, Device, Host
from ..store.store import Store
from .keep_option import KeepOption
from .mover import Mover
from .pending_evictions import PendingEvictions
from .record import Record, State, use_records
from .resident_reasons import name_largest_resident, unmet_need_text
from .unresizable import Unresizable

log = logging.getLogger("teraio")

VICTIMS_MOST = 64  # records below 1/64 of the missing bytes are evicted last

Keep = Callable[[Record], bool]


class Need(NamedTuple):
    """The bytes that must be resident together at a kernel when everything else is evicted."""

    fixed_bytes: int  # bytes that cannot move
    kernel_bytes: int  # bytes that can move, and that the kernel touches or makes
    kernel: str

    @property
    def size_bytes(self) -> int:
        """Return the sum of both."""
        return self.fixed_bytes + self.kernel_bytes


NOTHING = Need(0, 0, "")


class Residency:
    """The ledger of one engine: its records, its budget, and the choice of records to evict."""

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
        self.keep = keep or KeepOption()
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.kept_bytes = 0  # part of the reserve: bytes that user code holds while a program runs
        self.elastic = False  # True: memory="min"; the budget grows to the largest kernel's need
        self.records: dict[int, Record] = {}  # storage address -> record
        self.by_name: dict[str, Record] = {}
        self.mortal: dict[int, Record] = {}  # records of tensors that do not outlive the step
        self.reachable: dict[int, Record] = {}  # evictable records that user code may touch
        self.pending_evictions = PendingEvictions(self.in_use, self.try_end_evict)
        self.unresizable = Unresizable(self, self.keep.covers)
        self.serial = 1  # number of the slot; a record with an equal `used_at` is in use
        self.fixed_bytes = 0  # bytes of records that cannot move
        # Tensor's name -> ticks of its uses in the expected step, ascending.
        self.uses: Mapping[str, Sequence[float]] = {}
        self.step_ticks = 0  # number of ticks of the expected step
        self.largest = NOTHING  # the largest need of all programs that ran
        # Records whose writes failed, and which are not evicted again in this step.
        self.failed: dict[int, Record] = {}
        # Keys of storages whose last eviction was refused because an operator used the storage.
        self.refused: set[int] = set()
        # The error after which weights and states belong to no whole step.
        self.torn: TeraioError | None = None
        self.torn_is_known = False  # True: an error has reported the loss to the user
        # True: a warning has reported to the user that the device's memory is short.
        self.short_memory_is_known = False

    # ---- slots, steps, losses

    def advance_slot(self) -> int:
        """Begin the next slot, and return its number. Records of the previous slot are no longer in use."""
        self.serial += 1
        return self.serial

    def begin_step(self) -> None:
        """Begin a step. Evictions whose writes failed may be tried again."""
        self.advance_slot()
        self.pending_evictions.end_evictions_already_written()
        self.failed.clear()
        self.forget_dead_records()

    def expect_uses(self, uses: Mapping[str, Sequence[float]], step_ticks: int) -> None:
        """Choose the records to evict by these uses from now on. Uses are given as ticks of the step."""
        self.uses, self.step_ticks = uses, step_ticks

    def declare_loss(self, error: TeraioError, known: bool = False) -> None:
        """Record that weights or states were lost. `known` means that an error reports the loss to the user.

        After several losses, keep the first error, unless a later error has `known`.
        """
        if self.torn is None or known:
            self.torn = error
        self.torn_is_known = self.torn_is_known or known

    # ---- the budget

    def set_budget(self, budget_bytes: int | None) -> None:
        """Change the budget. None means the smallest budget that the known kernels need. The caller then
        evicts records until the resident bytes fit in the new budget.

        Raise BudgetError, and change nothing, if a known kernel needs more than the budget.
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
        """Raise the reserve to this size, if the reserve is smaller. An elastic budget grows by as many
        bytes. Return whether the reserve grew."""
        more = reserve_bytes - self.reserve_bytes
        if more > 0:
            self.reserve_bytes += more
            self.budget_bytes += more if self.elastic else 0
        return more > 0

    def set_reserve(self, reserve_bytes: int) -> None:
        """Set the reserve to this size."""
        self.reserve_bytes = reserve_bytes

    def reserve_for_user_code(self, kept_bytes: int) -> None:
        """Reserve this number of bytes for tensors that user code holds while a program runs."""
        self.reserve_bytes += kept_bytes - self.kept_bytes
        self.kept_bytes = kept_bytes

    def report_overrun(self, short: int, place: str, who: str = "user code") -> None:
        """Count and report the bytes that `who` gets beyond the budget. If the budget is elastic, grow it
        instead."""
        if self.elastic:
            self.budget_bytes += short
            return
        # Warn only if the overrun has more than doubled, to avoid a warning for each tensor.
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
        """Raise the peak, if necessary, to the resident bytes plus `extra_bytes`, which are in use outside of
        records."""
        self.mover.counts.note_peak(self.mover.resident_bytes + extra_bytes)

    # ---- records

    def add_record_of_storage(
        self, storage: torch.UntypedStorage, name: str, kind: str, evictable: bool
    ) -> Record:
        """Add a record of a resident storage."""
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
        """Return the tensor's record, or None if the tensor has no record that can be evicted."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            key = torch.Tensor.untyped_storage(tensor)._cdata
        record = self.records.get(key)
        return record if record is not None and record.evictable else None

    def records_of_storages(self, keys: Iterable[int]) -> list[Record]:
        """Return the records of these storages. Storages without a record are left out."""
        return [record for key in keys if (record := self.records.get(key)) is not None]

    def forbid_eviction(self, record: Record) -> None:
        """Keep the record resident from now on, and count its bytes as fixed."""
        if record.evictable:
            record.forbid_eviction()
            self.fixed_bytes += record.size_bytes
            self.reachable.pop(record.key, None)

    def allow_eviction(self, record: Record) -> None:
        """Allow the ledger to evict the record, and add the record to those that user code may touch. If user
        code or a library has the record's address for good, do nothing."""
        if record.addressed:
            return
        if not record.evictable:
            record.allow_eviction()
            self.fixed_bytes -= record.size_bytes
        self.make_reachable(record)

    def make_reachable(self, record: Record) -> None:
        """Record that user code may touch this evictable record."""
        assert record.evictable, record.name
        self.reachable[record.key] = record

    def forbid_eviction_for_good(self, record: Record, because: str) -> None:
        """Keep the record resident for this reason. Later uses of the tensor do not make it evictable."""
        self.forbid_eviction(record)
        record.note_address_kept(because)

    def recount_resized(self, record: Record, size_bytes: int) -> None:
        """Count a record at the size to which user code resized its storage, and keep the record resident for
        good."""
        self.forbid_eviction_for_good(record, "your code gave its storage another size")
        self.mover.subtract_resident_bytes(record)
        self.fixed_bytes += size_bytes - record.size_bytes
        record.resize(size_bytes)
        self.mover.add_resident_bytes(record)

    def change_kind(self, record: Record, kind: str, persistent: bool | None = None) -> None:
        """Change the record's kind, and whether its tensor outlives the step."""
        record.become(kind, record.persistent if persistent is None else persistent)
        if self.mover.recorder is not None:
            self.mover.recorder.note_kind_change(record)

    def rename(self, record: Record, name: str) -> None:
        """Change the record's name."""
        if self.by_name.get(record.name) is record:
            del self.by_name[record.name]
        record.rename(name)
        self.by_name[name] = record

    def forget_names_of_step(self) -> None:
        """Forget the names of records that do not outlive the step, because the next step assigns these names
        again."""
        self.by_name = {name: record for name, record in self.by_name.items() if record.persistent}

    # ---- the law

    def make_resident_within_budget(
        self, needed: Sequence[Record], live_bytes: int, kernel: str, tick: int | None
    ) -> None:
        """Make the records in `needed` resident, and leave room for `live_bytes` more. Raise BudgetError if
        this is impossible."""
        missing = 0
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

        If the device has less free memory than the budget allows, evict all other records that may move,
        except records that `keep` accepts.
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

    def fetch_ahead_if_memory(self, record: Record) -> bool:
        """Begin to fetch a record ahead of its use. Return False if the device has no memory for the record
        now."""
        try:
            self.mover.begin_fetch(record)
        except OUT_OF_MEMORY as error:
            self._warn_of_short_device(record, error)
            return False
        return True

    def evict_for_device(self, record: Record, error: BaseException, keep: Keep | None = None) -> None:
        """Evict every other record that may move, because the device has no memory for `record`. Do not evict
        records that `keep` accepts."""
        self._warn_of_short_device(record, error)
        self.refused.clear()
        others = [other for other in self._eviction_candidates() if keep is None or not keep(other)]
        for other in others:
            self.try_evict(other)
        for other in others:
            self.try_end_evict(other)

    def _warn_of_short_device(self, record: Record, error: BaseException) -> None:
        error.with_traceback(None)  # the traceback's frames would keep a program's tensors alive
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
        """Allow the allocator to keep freed memory up to the budget. Release kept memory that this step did
        not use."""
        room_bytes = self.budget_bytes - self.reserve_bytes + self.kept_bytes - self.mover.foreign_bytes
        self.mover.device.limit_tensors_and_spare_memory(room_bytes)
        self.mover.device.release_unused_spare_memory()

    def short_bytes(self, extra_bytes: int) -> int:
        """Return the number of bytes that are missing to fit `extra_bytes` in the budget. If `extra_bytes`
        fit, the number is negative or 0."""
        return self.mover.resident_bytes + extra_bytes + self.reserve_bytes - self.budget_bytes

    def fits(self, extra_bytes: int) -> bool:
        """Return whether `extra_bytes` fit in the budget. If they do not fit, forget dead records and try
        again."""
        if self.short_bytes(extra_bytes) > 0:
            self.forget_dead_records(self.mortal)
        return self.short_bytes(extra_bytes) <= 0

    def try_room_by_planned_evictions(self, extra_bytes: int, tick: int | None) -> bool:
        """Try to make room for `extra_bytes` by evictions that need no wait. Return whether the bytes fit in
        the budget.

        (1) End evictions whose bytes the plan already counts as free. (2) Evict spent gradients, which this
        step does not read again. Most spent gradients have a copy and are freed immediately. For all other
        spent gradients a write begins, which frees their bytes at a later slot.
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
        """Raise an error because a kernel does not fit in the budget, or grow an elastic budget."""
        if failure is not None:
            raise failure
        used_bytes = sum(record.size_bytes for record in self.records_of_storages(self.refused))
        self.refuse_or_grow_budget(Need(self.mover.resident_bytes, extra_bytes, kernel), used_bytes)

    def evict_until_fits(
        self, extra_bytes: int, tick: float | None, keep: Keep | None = None
    ) -> tuple[int, StoreError | None]:
        """Evict records until `extra_bytes` fit in the budget. Do not evict records that `keep` accepts.

        Return a pair: the number of bytes that are still missing, and the error of the last write that
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
            # All writes begin before the first wait for one of them.
            for move in (self.mover.begin_evict, self.mover.end_evict):
                for record in victims:
                    try:
                        move(record)
                    except StoreError as error:
                        failure = self.note_failed_eviction(record, error)
            self.refused.update(r.key for r in victims if r.state is State.RESIDENT)
            # A fetch that ended just now may have been the last holder of a dead tensor's storage.
            self.forget_dead_records()
        return 0, failure

    def victims(self, short: int, tick: float | None, keep: Keep | None) -> list[Record]:
        """Choose records to evict by furthest next use, until their sizes make up for `short` bytes.

        Records much smaller than `short` are chosen last, because each such eviction costs a transfer and
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
        """Begin to evict a resident record. If `tier` has room, evict the record to `tier`.

        Return whether the eviction is in flight. If the store refuses the write, or if an operator uses the
        record, return False.
        """
        try:
            self.mover.begin_evict(record, tier)
        except StoreError as error:
            self.note_failed_eviction(record, error)
        return record.state is State.EVICTING

    def try_end_evict(self, record: Record) -> StoreError | None:
        """Wait for an eviction in flight. Return the error if its write failed, otherwise None."""
        try:
            self.mover.end_evict(record)
        except StoreError as error:
            return self.note_failed_eviction(record, error)
        return None

    # ---- reports of the mover

    def note_eviction_begun(self, record: Record) -> None:
        """Forget that an eviction of this record is pending, because a new eviction begins."""
        self.pending_evictions.forget(record)

    def keep_unresizable(self, record: Record) -> None:
        """Keep a record resident until it can be adopted, because user code has shared its storage with
        numpy."""
        self.forbid_eviction(record)
        self.unresizable.add_fresh(record)

    def note_failed_eviction(self, record: Record, error: StoreError) -> StoreError:
        """Keep a record resident until the step ends, because the store did not take its bytes."""
        if not self.failed:
            log.warning("teraio: %s is kept resident, others are evicted instead: %s", record.name, error)
        error.with_traceback(None)  # the traceback's frames would keep a program's tensors alive
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
        """Return a key that is larger for a record whose next use is later.

        The order of kernels in the last step gives the next use, where this order is known. There are three
        groups of records, in the order of their keys. (1) Records without a known next use have the smallest
        keys, and the most recently used of them has the smallest key of all. (2) Then follow the records with
        a known next use. (3) Gradients that this step does not read again have the largest keys, because the
        next step makes new gradients.
        """
        ticks = self.uses.get(record.name)
        if not ticks or tick is None:
            return (0, -record.used_at)
        at = bisect_right(ticks, tick)
        if at < len(ticks):
            return (1, ticks[at])
        return (1, inf if record.kind == "grad" else ticks[0] + self.step_ticks)

    def is_over_budget(self, need: Need) -> bool:
        """Return whether the need and the reserve exceed the budget."""
        return need.size_bytes + self.reserve_bytes > self.budget_bytes

    def refuse_or_grow_budget(self, need: Need, used_bytes: int = 0) -> None:
        """Raise BudgetError because a need does not fit, or grow an elastic budget to the need.

        If the need does not fit only because of bytes that user code holds or uses now, report an overrun
        instead.
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
        """Record the largest need of a program. Every later budget must have room for this need."""
        self.largest = max(self.largest, need, key=lambda n: n.size_bytes)

    def raise_budget_error(self, need: Need) -> NoReturn:
        """Raise BudgetError for a need that exceeds the budget."""
        need = max(need, self.largest, key=lambda n: n.size_bytes)
        used = {r.key for r in self.records.values() if r.used_at == self.serial}
        names = name_largest_resident(self._unevictable_records(), used, self.mover.is_address_taken)
        raise BudgetError(unmet_need_text(*need, self.reserve_bytes, self.budget_bytes, names))

    def _unevictable_records(self) -> list[Record]:
        """Return the records whose bytes no eviction can free."""
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
        """Forget the records whose last tensor has died."""
        expired = torch.UntypedStorage._expired
        records = self.records if among is None else among
        dead = [r for r in records.values() if expired(r.weak) and r.pending is None]
        if dead:
            self._forget(dead)

    def dead_resident_bytes(self) -> int:
        """Return the number of bytes that still count as resident although the last tensor of their record
        has died."""
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
