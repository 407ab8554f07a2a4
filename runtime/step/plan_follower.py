"""The plan's moves at run time. A move is an eviction or a fetch. A plan is a table from ticks to operations.
A tick is the number of a slot in the step, and a slot is a point before a kernel. Each slot carries out the
operations of its tick.

A plan is a hint, so a move that is impossible now is skipped and counted. It is never an error. There are two
special cases. (1) A fetch finds no room. The fetch is then late: it begins at the first slot that has room
for the tensor. (2) The write of an eviction is still in flight at the tick at which the plan counts its bytes
as free. Compute waits for the write only when the bytes are needed (pending_evictions.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..ledger.record import Record, State
from ..ledger.residency import Residency
from .plan_table import FETCH, FREE, Operation
from .tracker import Expectation


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """The position of a slot in the plan: the expected step and the slot's tick in this step. `live_bytes` is
    the number of bytes that cannot be evicted at the slot."""

    expected: Expectation
    tick: int | None
    live_bytes: int


class PlanFollower:
    """The part of the engine that carries out the plan's moves at each slot."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.mover = residency.mover

    def carry_out(self, operations: Iterable[Operation], position: SlotPosition) -> None:
        """Carry out these operations of the plan. Skip and count each operation that is impossible now.

        A fetch that finds no room becomes late, and begins at a later slot. The operation FREE marks the tick
        at which the bytes of an eviction count as free. If the eviction's write is still in flight then, wait
        for the write only when the bytes are needed.
        """
        residency, pending = self.residency, self.residency.pending_evictions
        for what, name, tier in operations:
            if what == FETCH and position.expected.late:
                self.begin_late_fetches(position)
            position.expected.end_late_fetch(name)
            record = residency.by_name.get(name)
            done = False
            if record is None or record.is_dead() or record.is_discarded:
                pass
            elif what == FETCH and record.state is State.EVICTED:
                done = self._make_room_and_fetch(record, position)
                if not done:
                    position.expected.note_late_fetch(name)
            elif what == FETCH:
                done = pending.cancel_eviction(record)
            elif self._may_evict(record):
                done = residency.try_evict(record, tier)
                if done and what == FREE and pending.is_write_done(record):
                    done = residency.try_end_evict(record) is None
                elif done and what == FREE:
                    pending.add(record, by_plan=True)
            self.mover.counts.add(planned_moves=done, skipped_moves=not done)

    def _may_evict(self, record: Record) -> bool:
        """Return whether the plan may evict this record now. The record must be evictable, not in use, and
        its last write must not have failed."""
        residency = self.residency
        moves = record.evictable and record.state in {State.RESIDENT, State.WITHHELD, State.EVICTING}
        return moves and not residency.in_use(record) and record.key not in residency.failed

    def begin_late_fetches(self, position: SlotPosition) -> None:
        """Begin late fetches in the plan's order, while there is room. A fetch is late if it found no room at
        its tick. Forget a late fetch if its tensor was freed, or was fetched by now."""
        self.residency.pending_evictions.end_evictions_already_written()
        for name in list(position.expected.late):
            record = self.residency.by_name.get(name)
            if record is None or record.state is not State.EVICTED or record.is_dead():
                waits = False
            else:
                waits = not record.is_discarded
            if record is not None and waits and not self._make_room_and_fetch(record, position):
                return
            position.expected.end_late_fetch(name)

    def _make_room_and_fetch(self, record: Record, position: SlotPosition) -> bool:
        room = self.residency.try_room_by_planned_evictions(
            record.size_bytes + position.live_bytes, position.tick
        )
        return room and self.residency.fetch_ahead_if_memory(record)
