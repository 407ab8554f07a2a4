"""Progress lines for a person who waits for a plan: the planner at work, and its best step so far."""

from __future__ import annotations

from teraio.progress import tell_progress
from teraio.units import fmt_ns

# Certified bound of the step that is being planned. The `bound_ns` argument of a planner can be larger,
# because it is the step time at which the planner may stop.
_BOUND_NS = 0


def remember_bound_for_progress(bound_ns: int) -> None:
    """Remember the best bound found so far for all later progress lines."""
    global _BOUND_NS
    _BOUND_NS = bound_ns


def show_best_step(planner: str, best_ns: int) -> None:
    """Show the best step that this planner has found so far, and its distance from the bound."""
    bound_ns = _BOUND_NS

    def text() -> str:
        above = f", {best_ns / bound_ns - 1:.1%} above the bound {fmt_ns(bound_ns)}" if bound_ns else ""
        return f"{planner}, best so far {fmt_ns(best_ns)}{above}"

    tell_progress(text)


def show_bound_search(count: int) -> None:
    """Show that the relaxation is being solved, with the number of its check kernels."""
    tell_progress(f"lower bound by a relaxation with {count} check kernels")
