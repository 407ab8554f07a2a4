"""What a person who waits for a plan is told: who plans, and how good the best plan so far is."""

from __future__ import annotations

from teraio.progress import tell_progress
from teraio.units import fmt_ns

# Of the step that is being planned. Planners are given another: the one at which they may stop.
_BOUND_NS = 0


def remember_bound_for_progress(bound_ns: int) -> None:
    """Notes the bound that is known by now, for what is told from here on."""
    global _BOUND_NS
    _BOUND_NS = bound_ns


def show_best_step(planner: str, best_ns: int) -> None:
    """Tells the best step that this planner has so far, against the bound."""
    bound_ns = _BOUND_NS

    def text() -> str:
        above = f", {best_ns / bound_ns - 1:.1%} above the bound {fmt_ns(bound_ns)}" if bound_ns else ""
        return f"{planner}, best so far {fmt_ns(best_ns)}{above}"

    tell_progress(text)


def show_bound_search(count: int) -> None:
    """Tells that the bound is being found."""
    tell_progress(f"the bound, by a relaxation of {count} kernels")
