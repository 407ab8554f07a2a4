"""Evictions in flight on whose bytes later allocations rely.

There are two cases. (1) The plan counts the bytes as free from the eviction's `free` tick on. (2) The engine
has begun the eviction because a later allocation will need the bytes.

    begin_evict        tick `free` of the plan        an allocation needs the bytes
        |---- the write --------|---------------------------------|
                                if the write still runs,          if the write still runs, compute waits for
                                compute runs on                   the writes, in the order of the plan

Compute waits for a write only if an allocation needs the bytes. A kernel that needs room waits for all these
writes, before the engine evicts any other record. A planned fetch waits only for the evictions whose `free`
tick has passed.
"""

from __future__ import annotations

from collections.abc import Callable

from teraio.errors import StoreError

from .record import Record, State


class PendingEvictions:
    """Records whose evictions are in flight, in the order in which later allocations rely on their bytes."""

    def __init__(
        self, in_use: Callable[[Record], bool], end_evict: Callable[[Record], StoreError | None]
    ) -> None:
        self.in_use = in_use
        self.end_evict = end_evict
        self.records: dict[int, Record] = {}  # by storage key
        self.planned: set[int] = set()  # keys of records whose `free` tick has passed

    def add(self, record: Record, by_plan: bool = False) -> None:
        """Add an eviction in flight. If `by_plan` is True, the plan already counts the bytes as free."""
        self.forget(record)
        self.records[record.key] = record
        if by_plan:
            self.planned.add(record.key)

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes that will be free when all these writes have ended."""
        return sum(record.size_bytes for record in self._list_still_pending())

    @property
    def planned_bytes(self) -> int:
        """Return the number of bytes that the plan already counts as free, although their evictions are still
        in flight."""
        return sum(record.size_bytes for record in self._list_still_pending() if record.key in self.planned)

    def end_evictions_already_written(self) -> None:
        """Free the storages whose writes have ended."""
        for record in self._list_still_pending():
            if self.is_write_done(record):
                self._end_eviction(record)

    @staticmethod
    def is_write_done(record: Record) -> bool:
        """Return whether the write of the record's eviction has ended, or no write was necessary."""
        return record.pending is None or record.pending.done()

    def end_evictions_until_enough(
        self, enough: Callable[[], bool], by_plan: bool = False
    ) -> StoreError | None:
        """Wait for evictions and free their bytes, one after another, until `enough` returns True. If
        `by_plan` is True, take only evictions whose bytes the plan counts as free.

        Return the error of the last write that failed, or None.
        """
        failure: StoreError | None = None
        for record in self._list_still_pending():
            if enough():
                break
            if not by_plan or record.key in self.planned:
                failure = self._end_eviction(record) or failure
        return failure

    def _list_still_pending(self) -> list[Record]:
        """Forget the records whose evictions have ended. Return the other records, except those that a slot
        or user code uses now."""
        if not self.records:
            return []
        for record in list(self.records.values()):
            lives = record.pending is not None or not record.is_dead()
            if record.state is not State.EVICTING or not record.evictable or not lives:
                self.forget(record)
        return [record for record in self.records.values() if not self.in_use(record)]

    def _end_eviction(self, record: Record) -> StoreError | None:
        self.forget(record)
        return self.end_evict(record)

    def cancel_eviction(self, record: Record) -> bool:
        """Forget the record's eviction, because a fetch of the record was requested. Return whether the
        eviction was in flight."""
        known = self.records.get(record.key) is record and record.state is State.EVICTING
        if known:
            self.forget(record)
        return known

    def forget(self, record: Record) -> None:
        """Forget the record's eviction, so that no allocation waits for it."""
        self.records.pop(record.key, None)
        self.planned.discard(record.key)
