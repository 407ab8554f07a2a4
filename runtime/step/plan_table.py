"""A plan as a table from ticks to operations. A tick is the number of a slot in the whole step. At each slot,
the engine carries out the operations of the slot's tick."""

from __future__ import annotations

from teraio.formats.plan import Evict, Fetch, Plan

EVICT, FREE, FETCH = 0, 1, 2

Operation = tuple[int, str, str | None]  # operation, tensor, tier (None: the tier of the tensor's copy)
Table = dict[int, list[Operation]]


def table_of(plan: Plan, length: int) -> Table:
    """Return the table of a plan for a step of `length` ticks. At each tick, operations that free bytes come
    before operations that begin a transfer."""
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
