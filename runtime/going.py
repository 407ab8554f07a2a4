"""Writes whose room is counted on: by a plan that has the tensor gone by now, or for what user code gets.

    begin_evict      free by plan                room is asked for, and short
        |---- the write -----------------|--------------|
                          x  not done: nobody waits     x  now someone does, in the order of the plan

Compute that waits for a write whose room no one needs yet waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from teraio.errors import StoreError

from .records import Record, State


class Going:
    def __init__(
        self, in_use: Callable[[Record], bool], end_evict: Callable[[Record], StoreError | None]
    ) -> None:
        self.in_use = in_use
        self.end_evict = end_evict
        self.records: dict[int, Record] = {}  # by key, in the order in which their room is given

    def add(self, record: Record) -> None:
        self.records[record.key] = record

    @property
    def size_bytes(self) -> int:
        """What will be free without another write."""
        return sum(record.size_bytes for record in self._still())

    def end_done(self) -> None:
        """What has been written gives its room."""
        for record in self._still():
            if record.pending is None or record.pending.done():
                self._end(record)

    def end_until(self, enough: Callable[[], bool]) -> StoreError | None:
        """Waits for as many as it takes; returns what went wrong if something did."""
        failure: StoreError | None = None
        for record in self._still():
            if enough():
                break
            failure = self._end(record) or failure
        return failure

    def _still(self) -> list[Record]:
        """One that is needed after all, or was sent away by the law, is not going any more."""
        if not self.records:
            return []
        for record in [r for r in self.records.values() if r.state is not State.LEAVING]:
            del self.records[record.key]
        return [record for record in self.records.values() if not self.in_use(record)]

    def _end(self, record: Record) -> StoreError | None:
        del self.records[record.key]
        return self.end_evict(record)
