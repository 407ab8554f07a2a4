"""Fetches of all evicted records, whatever the budget. They run (1) before user code whose reads no observer
sees, and (2) when the engine ends."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from teraio.errors import BudgetError, StoreError
from teraio.units import fmt_bytes

from .record import Record, State
from .residency import Residency


def make_records_resident(residency: Residency, records: Iterable[Record]) -> None:
    """Make these records resident. Fill a record with NaN if its bytes are lost. Fetch all other records."""
    mover, records = residency.mover, list(records)
    wanted = {record.key for record in records}

    def make_room(record: Record, error: BaseException) -> None:
        residency.evict_for_device(record, error, lambda other: other.key in wanted)

    for begin in (True, False):
        for record in records:
            try:
                if begin and record.state is State.EVICTING:
                    mover.undo_evict(record)
                elif begin and record.state is State.EVICTED:
                    mover.begin_fetch(record, make_room=make_room)
                elif not begin and record.state is State.FETCHING:
                    mover.end_fetch(record)
            except StoreError as error:
                if record.state is State.EVICTED:
                    mover.fill_with_nan(record)
                    residency.declare_loss(error)


def make_everything_resident(residency: Residency, keep: Callable[[Record], bool]) -> None:
    """Fetch every evicted record.

    If memory is short, raise BudgetError. Before that, evict records again until the resident bytes fit in
    the budget. Do not evict records that `keep` accepts. Training can continue after this error.
    """
    residency.advance_slot()
    if sum(record.size_bytes for record in residency.records.values()) > residency.budget_bytes:
        gc.collect()  # the model does not fit, so free garbage instead of fetching it
    residency.forget_dead_records()
    evicted_bytes = sum(r.size_bytes for r in residency.records.values() if r.state is State.EVICTED)
    free_bytes = residency.mover.device.default_budget_bytes()
    cause = None
    if evicted_bytes <= free_bytes:
        try:
            make_records_resident(residency, residency.records.values())
            return
        except (RuntimeError, MemoryError) as error:  # an error of the allocator
            cause = error
        residency.advance_slot()
        residency.evict_until_fits(0, None, keep)
    raise BudgetError(
        f"the evicted tensors ({fmt_bytes(evicted_bytes)}) cannot all be fetched: the device has "
        f"{fmt_bytes(free_bytes)} free{f' ({cause})' if cause else ''}. Delete the model and its optimizer "
        f"first (del model, optimizer), or save them with teraio.save and end the process"
    ) from cause
