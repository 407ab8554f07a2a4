"""Training loops in the style of the documentation of several libraries."""

from __future__ import annotations

from strangers import (
    loops_gradients,
    loops_libraries,
    loops_more,
    loops_optimizers,
    loops_torch,
    loops_trl,
    loops_words,
)
from strangers.case import Case

FILES = (loops_torch, loops_words, loops_more, loops_gradients, loops_optimizers, loops_libraries, loops_trl)


def cases() -> dict[str, Case]:
    """Return a case for each loop, by the loop's name."""
    found: dict[str, Case] = {}
    for each in FILES:
        reasons: dict[str, str] = getattr(each, "REASONS", {})
        for name, loop in each.LOOPS.items():
            found[name] = Case(name, loop, reasons.get(name, ""))
    return found
