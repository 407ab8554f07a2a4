"""The plan's moves at run time. A plan is a table from ticks to operations. Each slot carries out the
operations of its tick.

A plan is a hint, so a move that is impossible now is skipped and counted. It is never an error. There are two
special cases. (1) A fetch without room is late. It begins at the first slot that has room for the tensor, so
that kernels seldom miss. (2) A write is still in flight at the tick where the plan counts its bytes as free.
Compute then waits for the write only when those bytes are needed (pending_evictions.py).
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
    """The position of a slot in the plan: (1) the expected step, (2) the tick, and (3) the number of bytes
    that cannot move."""

    expected: Expectation
    tick: int | None
    live_bytes: int


class PlanFollower:
    """The plan's moves, carried out at the slots of their ticks."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.mover = residency.mover

    def carry_out(self, operations: Iterable[Operation], position: SlotPosition) -> None:
        """Carry out these operations of the plan. Skip and count each operation that is impossible now.

        A fetch without room becomes late. If the write of an eviction is still in flight at the eviction's
        FREE operation, end the eviction only when its bytes are needed.
        """
        residency, pending = self.residency, self.residency.pending_evictions
        for what, name, tier in operations:
            if what == FETCH and position.expected.late:
                self.begin_late_fetches(position)
            position.expected.end_late_fetch(name)
            record = residency.by_name.get(name)
            done = False
            if record is None or record.is_dead():
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
        """Return whether the plan may evict this record now."""
        residency = self.residency
        moves = record.evictable and record.state in {State.RESIDENT, State.EVICTING}
        return moves and not residency.in_use(record) and record.key not in residency.failed

    def begin_late_fetches(self, position: SlotPosition) -> None:
        """Begin late fetches in the plan's order, while there is room. If a tensor has been fetched or has
        died meanwhile, its fetch is no longer late."""
        self.residency.pending_evictions.end_evictions_already_written()
        for name in list(position.expected.late):
            record = self.residency.by_name.get(name)
            waits = record is not None and record.state is State.EVICTED and not record.is_dead()
            if record is not None and waits and not self._make_room_and_fetch(record, position):
                return
            position.expected.end_late_fetch(name)

    def _make_room_and_fetch(self, record: Record, position: SlotPosition) -> bool:
        room = self.residency.try_room_by_planned_evictions(
            record.size_bytes + position.live_bytes, position.tick
        )
        return room and self.residency.fetch_ahead_if_memory(record)
