"""Why a tensor stays resident, for errors: its largest ones by name, each with the reason.

A record that cannot be evicted says why in `because`, or its kind says it: inputs and results belong to
whoever called the program. One that can be evicted stays where user code may read its bytes unseen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from teraio.units import fmt_bytes

from .records import Record, State

NAMED = 5  # tensors that an error lists

OF_KIND = {
    "input": "an input that eager code made: your code or a graph break holds it",
    "activation": "a result of a compiled program: your code, a hook or a graph break holds it",
    "grad": "a gradient of a class or layout that teraio does not evict, or one that your code was given",
    "weight": "its program needs it from its first kernel to its last",
    "state": "an optimizer state of a class or layout that teraio does not evict",
    "outside": "no compiled program has it",
}


def why(record: Record) -> str:
    """Return why this record stays."""
    if not record.evictable:
        return record.because or OF_KIND.get(record.kind, "its kind is not evicted")
    reasons = (
        (record.addressed or record.pointed, "your code asked for its address (data_ptr, a storage object)"),
        (not record.guardable, "a tensor of it has a class of its own"),
        (record.aliased, "another tensor shares its bytes: a view, .data, a state dict"),
        (record.held, "an eager graph of autograd has saved it"),
        (record.pins > 0, "your code is using it"),
    )
    return next((text for holds, text in reasons if holds), "the kernel uses it")


def largest(records: Iterable[Record], in_use: Collection[int]) -> str:
    """Name the largest records that stay, apart from those that the kernel itself uses."""
    resident = (r for r in records if r.state is not State.AWAY and not r.dead())
    staying = [r for r in resident if r.key not in in_use]
    staying.sort(key=lambda r: -r.size_bytes)
    told = [f"{r.name} ({fmt_bytes(r.size_bytes)}: {why(r)})" for r in staying[:NAMED]]
    more = len(staying) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more > 0 else "")
