"""Progress lines for a person who waits for a plan: the planner at work, and its best step so far."""

from __future__ import annotations

from teraio.progress import tell_progress
from teraio.units import fmt_ns

# Proven lower bound on the step time, for progress lines. Planners also have an argument `bound_ns`. It can
# be larger, because a planner stops at this step time.
_BOUND_NS = 0


def remember_bound_for_progress(bound_ns: int) -> None:
    """Set the bound that all later progress lines show."""
    global _BOUND_NS
    _BOUND_NS = bound_ns


def show_best_step(planner: str, best_ns: int) -> None:
    """Show the shortest step time that this planner has found so far, and its distance from the bound."""
    bound_ns = _BOUND_NS

    def text() -> str:
        above = f", {best_ns / bound_ns - 1:.1%} above the bound {fmt_ns(bound_ns)}" if bound_ns else ""
        return f"{planner}, best so far {fmt_ns(best_ns)}{above}"

    tell_progress(text)


def show_bound_search(count: int) -> None:
    """Show that the search for the lower bound runs, and the number of check kernels of its relaxation."""
    tell_progress(f"lower bound by a relaxation with {count} check kernels")
