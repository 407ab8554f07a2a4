"""A plan becomes a table, tick -> operations, and a slot carries out those of its tick. A move that does not
fit what is there is skipped and counted, never an error: a plan is a hint. A fetch that found no room is late
and begins at the first slot that has room for it, so that kernels seldom have to ask for it. A write that is
not done when its room is free by the plan is waited for only when someone needs that room
(pending_evictions.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from teraio.errors import StoreError

from ..ledger.mover import Mover
from ..ledger.record import Record, State
from ..ledger.residency import Residency
from .plan_table import FETCH, FREE, Operation
from .tracker import Expectation


@dataclass(frozen=True, slots=True)
class SlotPosition:
    """A slot: of which step, at which of its ticks, with how many bytes that no one can move."""

    expected: Expectation
    tick: int | None
    live_bytes: int


class PlanFollower:
    def __init__(self, residency: Residency, mover: Mover) -> None:
        self.residency = residency
        self.mover = mover

    def follow_plan_at_slot(self, here: SlotPosition, stays: Iterable[Record]) -> None:
        """`stays`: what the next kernel needs, whatever the plan says of it."""
        for needed in stays:
            needed.used_at = self.residency.serial
        for operation in here.expected.table.get(here.tick, ()) if here.tick is not None else ():
            self.carry_out_operation(operation, here)
        self.begin_late_fetches(here)

    def carry_out_operation(self, operation: Operation, here: SlotPosition) -> None:
        what, name, tier = operation
        counts, late = self.mover.counts, here.expected.late
        if what == FETCH and late:
            self.begin_late_fetches(here)
        late.pop(name, None)
        record = self.residency.by_name.get(name)
        if record is not None and not record.is_dead() and self._try_move(what, record, tier, here):
            counts.planned_moves += 1
            return
        counts.skipped_moves += 1
        if what == FETCH and record is not None and record.state is State.AWAY:
            late[name] = None

    def begin_late_fetches(self, here: SlotPosition) -> None:
        """In the plan's order, as many as there is room for. What is here, or gone, is not late any more."""
        self.residency.pending_evictions.end_evictions_already_written()
        late = here.expected.late
        for name in list(late):
            record = self.residency.by_name.get(name)
            if (
                record is not None
                and record.state is State.AWAY
                and not (record.is_dead() or self._make_room_and_fetch(record, here))
            ):
                return
            del late[name]

    def _make_room_and_fetch(self, record: Record, here: SlotPosition) -> bool:
        room = self.residency.try_room_by_planned_evictions(record.size_bytes + here.live_bytes, here.tick)
        return room and self.residency.shortage.begin_fetch_if_memory(record)

    def _try_move(self, what: int, record: Record, tier: str | None, here: SlotPosition) -> bool:
        if what == FETCH:
            if record.state is not State.AWAY:
                return self.residency.pending_evictions.cancel_eviction(record)
            return self._make_room_and_fetch(record, here)
        if (
            not record.evictable
            or self.residency.in_use(record)
            or record.key in self.residency.failed
            or record.state not in {State.DEVICE, State.LEAVING}
        ):
            return False
        try:
            if record.state is State.DEVICE:
                self.residency.begin_evict_if_resizable(record, tier)
            if what == FREE and record.state is State.LEAVING:
                if self.residency.pending_evictions.is_write_done(record):
                    self.mover.end_evict(record)
                else:
                    self.residency.pending_evictions.add(record, by_plan=True)
        except StoreError as error:
            self.residency.note_failed_eviction(record, error)
            return False
        return True
