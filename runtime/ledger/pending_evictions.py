"""Writes whose room is counted on: by a plan that has the tensor gone by now, or by what comes next.

    begin_evict      free by plan                room is asked for, and short
        |---- the write -----------------|--------------|
                          x  not done: nobody waits     x  now someone does, in the order of the plan

Compute that waits for a write whose room no one needs yet waits for nothing. A kernel that needs room waits
for all of them before it sends anything else away; a planned fetch for those that its plan has gone by now.
"""

from __future__ import annotations

from collections.abc import Callable

from teraio.errors import StoreError

from .record import Record, State


class PendingEvictions:
    def __init__(
        self, in_use: Callable[[Record], bool], end_evict: Callable[[Record], StoreError | None]
    ) -> None:
        self.in_use = in_use
        self.end_evict = end_evict
        self.records: dict[int, Record] = {}  # by key, in the order in which their room is given
        self.planned: set[int] = set()  # those that a plan has gone by now

    def add(self, record: Record, by_plan: bool = False) -> None:
        self.forget(record)
        self.records[record.key] = record
        if by_plan:
            self.planned.add(record.key)

    @property
    def size_bytes(self) -> int:
        """What will be free without another write."""
        return sum(record.size_bytes for record in self._list_still_pending())

    @property
    def planned_bytes(self) -> int:
        return sum(record.size_bytes for record in self._list_still_pending() if record.key in self.planned)

    def end_evictions_already_written(self) -> None:
        """What has been written gives its room."""
        for record in self._list_still_pending():
            if self.is_write_done(record):
                self._end_eviction(record)

    @staticmethod
    def is_write_done(record: Record) -> bool:
        """Its write, if it takes one."""
        return record.pending is None or record.pending.done()

    def end_evictions_until_enough(
        self, enough: Callable[[], bool], by_plan: bool = False
    ) -> StoreError | None:
        """Waits for as many as it takes, of all or of those `by_plan`; returns what went wrong if something
        did."""
        failure: StoreError | None = None
        for record in self._list_still_pending():
            if enough():
                break
            if not by_plan or record.key in self.planned:
                failure = self._end_eviction(record) or failure
        return failure

    def _list_still_pending(self) -> list[Record]:
        """One that is needed after all, was sent away by the law or has died is not going any more."""
        if not self.records:
            return []
        for record in list(self.records.values()):
            lives = record.pending is not None or not record.is_dead()
            if record.state is not State.LEAVING or not record.evictable or not lives:
                self.forget(record)
        return [record for record in self.records.values() if not self.in_use(record)]

    def _end_eviction(self, record: Record) -> StoreError | None:
        self.forget(record)
        return self.end_evict(record)

    def cancel_eviction(self, record: Record) -> bool:
        """It is to come back before it has gone: it need not go. Whether it was one of these."""
        known = self.records.get(record.key) is record and record.state is State.LEAVING
        if known:
            self.forget(record)
        return known

    def forget(self, record: Record) -> None:
        self.records.pop(record.key, None)
        self.planned.discard(record.key)
