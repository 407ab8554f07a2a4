"""The law: what a kernel needs is resident, and everything that is resident fits the budget.

The ledger counts every storage that has a record, in full, from the start of its fetch to the end of its
eviction. Room is made by furthest next use: by the last step's order where it is known, else by least recent
use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch

from teraio.errors import BudgetError, StoreError
from teraio.units import fmt_bytes

from .moves import Mover
from .records import Record, State

log = logging.getLogger("teraio")


class Residency:
    def __init__(self, mover: Mover, budget_bytes: int, reserve_bytes: int) -> None:
        self.mover = mover
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.records: dict[int, Record] = {}  # storage address -> record
        self.by_name: dict[str, Record] = {}
        self.reachable: dict[int, Record] = {}  # weights: resident whenever user code runs
        self.pinned: list[Record] = []
        self.fixed_bytes = 0  # of records that never move
        self.uses: dict[str, list[int]] = {}  # name -> ticks of the last step, ascending
        self.step_ticks = 0  # how many that step had
        self.failed: dict[int, Record] = {}  # could not be written: not tried again in this step
        self.torn: StoreError | None = None  # what was lost with a weight

    def add(self, storage: torch.UntypedStorage, name: str, kind: str, evictable: bool) -> Record:
        record = Record(storage, name, kind, evictable)
        record.persistent = kind in {"weight", "state"}
        self.records[record.key] = record
        self.by_name[name] = record
        self.mover.resident_bytes += record.size_bytes
        self.fixed_bytes += 0 if evictable else record.size_bytes
        return record

    def ensure(self, needed: Sequence[Record], live_bytes: int, kernel: str, tick: int | None) -> None:
        """Everything in `needed` is resident, and `live_bytes` more fit, when this returns."""
        missing = 0
        for record in needed:
            record.pins += 1
            if record.state is State.LEAVING:
                self.mover.undo_evict(record)
            elif record.state is State.AWAY:
                missing += record.size_bytes
        self.pinned += needed
        self.make_room(missing + live_bytes, kernel, tick)
        for record in needed:
            if record.state is State.AWAY:
                self.mover.counts.misses += 1
                self.mover.begin_fetch(record, demand=True)
        for record in needed:
            if record.state is State.ARRIVING:
                self.mover.end_fetch(record)
        counts = self.mover.counts
        counts.peak_bytes = max(counts.peak_bytes, self.mover.resident_bytes + live_bytes)

    def short_bytes(self, extra_bytes: int) -> int:
        return self.mover.resident_bytes + extra_bytes + self.reserve_bytes - self.budget_bytes

    def fits(self, extra_bytes: int) -> bool:
        if self.short_bytes(extra_bytes) > 0:
            self.bury()
        return self.short_bytes(extra_bytes) <= 0

    def make_room(self, extra_bytes: int, kernel: str, tick: int | None) -> None:
        if self.fits(extra_bytes):
            return
        failure: StoreError | None = None
        while (short := self.short_bytes(extra_bytes)) > 0:
            victims = self._victims(short, tick)
            if not victims:
                if failure is not None:
                    raise failure
                self._refuse(short, extra_bytes, kernel)
            failure = self._evict(victims) or failure

    def _victims(self, short: int, tick: int | None) -> list[Record]:
        """By furthest next use, as many as make up for `short` bytes, or all there are."""
        victims: list[Record] = []
        for record in sorted(self._candidates(), key=lambda r: self._next_use(r, tick), reverse=True):
            if short <= 0:
                break
            victims.append(record)
            short -= record.size_bytes
        return victims

    def _evict(self, victims: Sequence[Record]) -> StoreError | None:
        """Evicts them all at once. What cannot be written stays, and is not tried again in this step."""
        failure: StoreError | None = None
        for begin in (True, False):
            for record in victims:
                try:
                    if record.state is State.ARRIVING:
                        self.mover.end_fetch(record)
                    if begin and record.state is State.DEVICE:
                        self.mover.begin_evict(record)
                    elif not begin and record.state is State.LEAVING:
                        self.mover.end_evict(record)
                except StoreError as error:
                    failure = self.keep_failed(record, error)
        return failure

    def keep_failed(self, record: Record, error: StoreError) -> StoreError:
        """A tensor that the store does not take stays in memory until the step ends."""
        if not self.failed:
            log.warning("teraio: %s stays in memory, others take its place: %s", record.name, error)
        self.failed[record.key] = record
        self.mover.counts.failed_moves += 1
        return error

    def _candidates(self) -> list[Record]:
        return [
            record
            for record in self.records.values()
            if record.evictable
            and not record.pins
            and record.state is not State.AWAY
            and record.key not in self.failed
        ]

    def _next_use(self, record: Record, tick: int | None) -> tuple[int, int]:
        """By the last step's order where it is known, else by least recent use (and sooner than all
        known)."""
        ticks = self.uses.get(record.name)
        if not ticks or tick is None:
            return (0, -record.last_tick)
        return (1, next((t for t in ticks if t > tick), ticks[0] + self.step_ticks))

    def _refuse(self, short: int, extra_bytes: int, kernel: str) -> NoReturn:
        need = self.budget_bytes + short
        needed, given = fmt_bytes(need, up=True), fmt_bytes(self.budget_bytes)
        if needed == given:  # a few bytes are missing
            needed, given = f"{need} bytes", f"{self.budget_bytes} bytes"
        raise BudgetError(
            f"the step needs {needed} at kernel {kernel} ({fmt_bytes(self.mover.resident_bytes)} "
            f"that cannot leave, {fmt_bytes(extra_bytes)} that the kernel needs, "
            f"{fmt_bytes(self.reserve_bytes)} in reserve); "
            f"memory is {given}. Give at least {needed}, more if a later kernel needs it, or a smaller batch"
        )

    def unpin(self) -> None:
        for record in self.pinned:
            record.pins -= 1
        self.pinned.clear()

    def bury(self) -> None:
        """Forgets the storages whose last tensor is gone."""
        for key, record in list(self.records.items()):
            if record.pending is None and record.dead():
                self.mover.forget(record)
                self.fixed_bytes -= 0 if record.evictable else record.size_bytes
                del self.records[key]
                self.reachable.pop(key, None)
                if self.by_name.get(record.name) is record:
                    del self.by_name[record.name]

    def bring_back(self, records: Iterable[Record]) -> None:
        """Makes all of these resident. One that is lost does not keep the others away."""
        records = list(records)
        for begin in (True, False):
            for record in records:
                try:
                    if begin and record.state is State.LEAVING:
                        self.mover.undo_evict(record)
                    elif begin and record.state is State.AWAY:
                        self.mover.begin_fetch(record)
                    elif not begin and record.state is State.ARRIVING:
                        self.mover.end_fetch(record)
                except StoreError as error:
                    if record.state is State.AWAY:
                        self.mover.fill_with_nan(record)
                        self.torn = self.torn or error
