"""The choice of updates that run late. In: a profile, a machine, a budget. Out: names of weights.

A late update waits for the next forward, so its gradient lives longer. This costs most for the weights that
the forward uses last: the backward makes their gradients first. So each tried set has the updates of the
weights that the forward uses first, up to some weight. The choice is the set with the fastest quick plan.

The planners improve a quick plan by some percent, and by how much is not known before. So a set must also
lower a quick bound, which no plan can beat. Otherwise no update is late.
"""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic

from teraio.errors import PlanError
from teraio.formats.late_updates import find_updates, profile_with_late_updates, weights_of
from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.progress import tell_progress

from .auto import CLOSE, quick_greedy_plan
from .bound.bound import lower_bound
from .problem.problem import build_problem, refuse_budget_below_floor

PARTS = 8  # the sets are eighths of all updates
SHARE = 0.3  # after this share of the time limit, no other set is tried
# A set of late updates must lower the quick plan's step and the bound by this factor. A set for Llama 8B that
# lowered its bound by less, on a machine with one drive, gave a slower plan in the end.
WORTH = 1.015
BOUND_S = 2.0  # time limit for the bound of one set; it takes 0.3 s for 8B, 1 s for 70B


def choose_late_updates(
    profile: Profile, machine: Machine, budget_bytes: int, keep: Collection[str], time_limit_s: float
) -> tuple[str, ...]:
    """Return the weights whose updates run late in the fastest quick plan that was found in the time."""
    updates = sorted(find_updates(profile), key=lambda update: (update.before, update.tick))
    stop = monotonic() + SHARE * time_limit_s
    found: dict[int, tuple[int, int]] = {}  # by number of parts: the quick plan's step, and the bound

    def late_of(parts: int) -> tuple[str, ...]:
        return weights_of(updates[: len(updates) * parts // PARTS])

    def try_parts(parts: int) -> None:
        if parts in found or not 0 <= parts <= PARTS or (found and monotonic() > stop):
            return
        tell_progress(f"{parts} of {PARTS} parts of the updates are late")
        step = profile_with_late_updates(profile, late_of(parts))
        found[parts] = _quick_step_and_bound_ns(step, machine, budget_bytes, keep)

    def best_parts() -> int:
        worth = [0]
        for parts, (step_ns, bound_ns) in found.items():
            if step_ns * WORTH <= found[0][0] and bound_ns * WORTH <= found[0][1]:
                worth.append(parts)
        return min(worth, key=lambda parts: (found[parts], parts))

    if not updates:
        return ()
    try_parts(0)
    if found[0][0] > CLOSE * profile.compute_ns:
        for parts in (PARTS, PARTS // 2, PARTS // 4, PARTS - PARTS // 4):
            try_parts(parts)
        best = best_parts()
        for parts in (best - 1, best + 1) if best else ():
            try_parts(parts)
    return late_of(best_parts())


def _quick_step_and_bound_ns(
    profile: Profile, machine: Machine, budget_bytes: int, keep: Collection[str]
) -> tuple[int, int]:
    """Return the step of a quick plan, and the bound. Return huge numbers if there is no plan."""
    problem = build_problem(profile, machine, keep)
    try:
        refuse_budget_below_floor(problem, budget_bytes)
        lower = lower_bound(problem, machine, budget_bytes, time_limit_s=BOUND_S, refined=False)
        step_ns, _ = quick_greedy_plan(lower.add_hints(problem), machine, budget_bytes, lower.step_ns)
        return step_ns, lower.step_ns
    except PlanError:
        return 2**62, 2**62
