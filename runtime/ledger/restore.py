"""Fetches that ignore the budget. The engine makes them in two cases: (1) before user code whose reads the
engine cannot observe, (2) at the end of the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from teraio.errors import BudgetError, StoreError
from teraio.units import fmt_bytes

from .record import Record, State
from .residency import Residency


def make_records_resident(residency: Residency, records: Iterable[Record]) -> None:
    """Make the tensors of these records resident. If the bytes of a tensor cannot be fetched, fill the tensor
    with NaN."""
    mover, records = residency.mover, list(records)
    wanted = {record.key for record in records}

    def make_room(record: Record, error: BaseException) -> None:
        residency.evict_for_device(record, error, lambda other: other.key in wanted)

    for begin in (True, False):
        for record in records:
            try:
                if begin and record.state is State.EVICTING:
                    mover.undo_evict(record)
                elif begin and record.is_discarded:
                    mover.fill_with_nan(record)
                elif begin and record.state is State.EVICTED:
                    mover.begin_fetch(record, make_room=make_room)
                elif not begin and record.state is State.FETCHING:
                    mover.end_fetch(record)
                if not begin:
                    residency.owed_tensors.reveal([record])
            except StoreError as error:
                if record.state is State.EVICTED:
                    mover.fill_with_nan(record)
                    residency.declare_loss(error)


def make_everything_resident(residency: Residency, keep: Callable[[Record], bool]) -> None:
    """Fetch every evicted tensor.

    Raise BudgetError if the device has too little memory. If the device runs out of memory during the
    fetches, first evict tensors again, until the resident tensors fit in the budget. Tensors whose record
    `keep` accepts are not evicted. After this error, training can continue.
    """
    residency.advance_slot()
    if sum(record.size_bytes for record in residency.records.values()) > residency.budget_bytes:
        gc.collect()  # the tensors exceed the budget: free unused tensors instead of fetching them
    residency.forget_dead_records()
    evicted_bytes = sum(r.size_bytes for r in residency.records.values() if r.state is State.EVICTED)
    free_bytes = residency.mover.device.default_budget_bytes()
    cause = None
    if evicted_bytes <= free_bytes:
        try:
            make_records_resident(residency, residency.records.values())
            return
        except (RuntimeError, MemoryError) as error:  # torch's allocator found no memory
            cause = error
        residency.advance_slot()
        residency.evict_until_fits(0, None, keep)
    raise BudgetError(
        f"the evicted tensors ({fmt_bytes(evicted_bytes)}) cannot all be fetched: the device has "
        f"{fmt_bytes(free_bytes)} free{f' ({cause})' if cause else ''}. Delete the model and its optimizer "
        f"first (del model, optimizer), or save them with teraio.save and end the process"
    ) from cause
