"""Reasons why tensors are resident, for the texts of errors. An error lists the largest resident tensors,
each with its reason.

A record is the engine's entry for the storage of a tensor. Its field `because` usually has the reason why the
tensor cannot be evicted. If `because` is empty, the tensor's kind is the reason. For example, an input cannot
be evicted because the program's caller holds it.

A tensor that can be evicted may be resident for two reasons. (1) A kernel or user code uses the tensor now.
(2) User code has the tensor's address.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from teraio.units import fmt_bytes

from .record import Record, State

NAMED = 5  # an error lists at most this many tensors

OF_KIND = {
    "input": "an input that eager code made: your code or a graph break holds it",
    "activation": "a result of a compiled program: your code, a hook or a graph break holds it",
    "grad": "a gradient of a class or layout that teraio does not evict, or one that your code was given",
    "weight": "its program needs it from its first kernel to its last",
    "state": "an optimizer state of a class or layout that teraio does not evict",
    "outside": "no compiled program has it",
}


def why(record: Record, pointed: bool) -> str:
    """Return the reason why the tensor of this record is resident. `pointed` is True if user code has the
    tensor's address."""
    if not record.evictable:
        return record.because or OF_KIND.get(record.kind, "its kind is not evicted")
    if pointed:
        return "your code asked for its address (data_ptr, a storage object)"
    return "your code is using it" if record.pins > 0 else "the kernel uses it"


def name_largest_resident(
    records: Iterable[Record], in_use: Collection[int], pointed: Callable[[Record], bool]
) -> str:
    """Return the names of the largest resident tensors, each with its reason. Leave out the tensors whose
    keys are in `in_use`, because the present kernel uses them."""
    resident = (r for r in records if r.state is not State.EVICTED and not r.is_dead())
    others = [r for r in resident if r.key not in in_use]
    others.sort(key=lambda r: -r.size_bytes)
    named = [f"{r.name} ({fmt_bytes(r.size_bytes)}: {why(r, pointed(r))})" for r in others[:NAMED]]
    more = len(others) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more > 0 else "")


def unmet_need_text(
    fixed_bytes: int, kernel_bytes: int, kernel: str, reserve_bytes: int, budget_bytes: int, names: str
) -> str:
    """Return the text of the error for a kernel that needs more memory than the budget."""
    need_bytes = fixed_bytes + kernel_bytes + reserve_bytes
    needed, given = fmt_bytes(need_bytes, up=True), fmt_bytes(budget_bytes)
    if needed == given:  # the rounded numbers are equal, so print exact bytes
        needed, given = f"{need_bytes} bytes", f"{budget_bytes} bytes"
    named = f". The largest that cannot be evicted: {names}" if names and fixed_bytes else ""
    return (
        f"the step needs {needed} at kernel {kernel} ({fmt_bytes(fixed_bytes)} that cannot be evicted, "
        f"{fmt_bytes(kernel_bytes)} that the kernel needs, {fmt_bytes(reserve_bytes)} in reserve); memory is "
        f"{given}. Give at least {needed}, more if a later kernel needs it, or a smaller batch{named}"
    )
