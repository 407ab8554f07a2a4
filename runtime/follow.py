"""A plan becomes a table, tick -> operations, and a slot carries out those of its tick. A move that does not
fit what is there is skipped and counted, never an error: a plan is a hint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from teraio.errors import StoreError
from teraio.plan import Evict, Fetch, Plan

from .moves import Mover
from .records import Record, State
from .residency import Residency

EVICT, FREE, FETCH = 0, 1, 2

Operation = tuple[int, str, str | None]  # what, of which tensor, to which tier or from it; None: as it is
Table = dict[int, list[Operation]]


def table_of(plan: Plan, length: int) -> Table:
    """For a step of so many ticks: at each of them releases before new transfers."""
    table: Table = {}
    for move in plan.moves:
        match move:
            case Evict(tensor, to, free, trigger):
                if trigger is not None and trigger < free:
                    table.setdefault(trigger % length, []).append((EVICT, tensor, to))
                table.setdefault(free % length, []).append((FREE, tensor, to))
            case Fetch(tensor, origin, trigger, _):
                table.setdefault(trigger % length, []).append((FETCH, tensor, origin))
    for operations in table.values():
        operations.sort(key=lambda operation: (operation[0] != FREE, operation[0]))
    return table


class Follower:
    def __init__(self, residency: Residency, mover: Mover) -> None:
        self.residency = residency
        self.mover = mover

    def follow(self, operations: Sequence[Operation], live_bytes: int, stays: Iterable[Record]) -> None:
        """`stays`: what the next kernel needs, whatever the plan says of it."""
        counts = self.mover.counts
        for needed in stays:
            needed.used_at = self.residency.serial
        for operation, name, tier in operations:
            record = self.residency.by_name.get(name)
            if record is None or record.dead() or not self._move(operation, record, tier, live_bytes):
                counts.skipped_moves += 1
            else:
                counts.planned_moves += 1

    def _move(self, operation: int, record: Record, tier: str | None, live_bytes: int) -> bool:
        if operation == FETCH:
            if record.state is not State.AWAY or not self.residency.fits(record.size_bytes + live_bytes):
                return False
            self.mover.begin_fetch(record)
            return True
        if (
            not record.evictable
            or self.residency.in_use(record)
            or record.key in self.residency.failed
            or record.state not in {State.DEVICE, State.LEAVING}
        ):
            return False
        try:
            if record.state is State.DEVICE:
                self.residency.begin_evict(record, tier)
            if operation == FREE and record.state is State.LEAVING:
                self.mover.end_evict(record)
        except StoreError as error:
            self.residency.keep_failed(record, error)
            return False
        return True
