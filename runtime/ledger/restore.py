"""Fetches of all that is evicted, whatever the budget: before user code that nobody sees, and at the end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from teraio.errors import BudgetError, StoreError
from teraio.units import fmt_bytes

from .record import Record, State
from .residency import Residency


def make_records_resident(residency: Residency, records: Iterable[Record]) -> None:
    """Makes all of these resident. One that is lost does not keep the others away."""
    mover, records = residency.mover, list(records)
    wanted = {record.key for record in records}
    for begin in (True, False):
        for record in records:
            try:
                if begin and record.state is State.LEAVING:
                    mover.undo_evict(record)
                elif begin and record.state is State.AWAY:
                    residency.shortage.begin_fetch_making_room(record, lambda r: r.key in wanted)
                elif not begin and record.state is State.ARRIVING:
                    mover.end_fetch(record)
            except StoreError as error:
                if record.state is State.AWAY:
                    mover.fill_with_nan(record)
                    residency.torn = residency.torn or error


def make_everything_resident(residency: Residency, stays: Callable[[Record], bool]) -> None:
    """Everything that is away. BudgetError if there is no memory for it: what came leaves again, except what
    `stays`, and all goes on as before."""
    residency.serial += 1
    if sum(record.size_bytes for record in residency.records.values()) > residency.budget_bytes:
        gc.collect()  # a model that does not fit: what is garbage of it need not come back
    residency.forget_dead_records()
    away_bytes = sum(r.size_bytes for r in residency.records.values() if r.state is State.AWAY)
    there_bytes = residency.mover.device.default_budget_bytes()
    cause = None
    if away_bytes <= there_bytes:
        try:
            make_records_resident(residency, residency.records.values())
            return
        except (RuntimeError, MemoryError) as error:  # the allocator's
            cause = error
        residency.serial += 1
        residency.evict_until_fits(0, None, stays)
    away, there = fmt_bytes(away_bytes), fmt_bytes(there_bytes)
    raise BudgetError(
        f"everything that is away was to come back to memory, and does not fit there: {away} are away, "
        f"{there} can be had{f' ({cause})' if cause else ''}. Let the model and its optimizer go first "
        f"(del model, optimizer), or keep them with teraio.save and end the process"
    ) from cause
