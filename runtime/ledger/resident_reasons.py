"""Why a tensor stays resident, for errors: its largest ones by name, each with the reason.

A record that cannot be evicted says why in `because`, or its kind says it: inputs and results belong to
whoever called the program. One that can be evicted stays while someone uses it, or has its address.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from teraio.units import fmt_bytes

from .record import Record, State

NAMED = 5  # tensors that an error lists

OF_KIND = {
    "input": "an input that eager code made: your code or a graph break holds it",
    "activation": "a result of a compiled program: your code, a hook or a graph break holds it",
    "grad": "a gradient of a class or layout that teraio does not evict, or one that your code was given",
    "weight": "its program needs it from its first kernel to its last",
    "state": "an optimizer state of a class or layout that teraio does not evict",
    "outside": "no compiled program has it",
}


def why(record: Record, pointed: bool) -> str:
    """Return why this record stays, of which someone may have the address."""
    if not record.evictable:
        return record.because or OF_KIND.get(record.kind, "its kind is not evicted")
    if pointed:
        return "your code asked for its address (data_ptr, a storage object)"
    return "your code is using it" if record.pins > 0 else "the kernel uses it"


def name_largest_resident(
    records: Iterable[Record], in_use: Collection[int], pointed: Callable[[Record], bool]
) -> str:
    """Name the largest records that stay, apart from those that the kernel itself uses."""
    resident = (r for r in records if r.state is not State.AWAY and not r.is_dead())
    staying = [r for r in resident if r.key not in in_use]
    staying.sort(key=lambda r: -r.size_bytes)
    told = [f"{r.name} ({fmt_bytes(r.size_bytes)}: {why(r, pointed(r))})" for r in staying[:NAMED]]
    more = len(staying) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")
