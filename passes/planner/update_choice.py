"""The choice of updates that run late or in the backward. In: a profile, a machine, a budget. Out: names of
weights.

A late update waits for the next forward, so its gradient lives longer. This costs most for the weights that
the forward uses last: the backward makes their gradients first. So each tried set has the updates of the
weights that the forward uses first, up to some weight. The choice is the set with the fastest quick plan.

The planners improve a quick plan by some percent, and by how much is not known before. So a set must also
lower a quick bound, which no plan can beat. Otherwise no update is late.

An update in the backward uses its gradient where it is made, so the gradient never moves. If updates may run
in the backward, all that can run there do so, unless a quick plan with half of them or none is faster. Of
the other updates, the late ones are chosen by quick plans, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import monotonic

from teraio.errors import PlanError
from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.formats.updates import find_backward_updates, find_updates, profile_with_updates, weights_of
from teraio.progress import tell_progress

from .auto import CLOSE, quick_greedy_plan
from .bound.bound import lower_bound
from .problem.problem import build_problem, refuse_budget_below_floor

PARTS = 8  # the sets are eighths of all updates
SHARE = 0.3  # after this share of the time limit, no other set is tried
BACKWARD_SHARE = 0.25  # the same, if updates may run in the backward
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
        step = profile_with_updates(profile, late_of(parts))
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


def choose_updates_to_place(
    profile: Profile, machine: Machine, budget_bytes: int, keep: Collection[str], time_limit_s: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the weights whose updates run late, and the weights whose updates run in the backward, in the
    fastest quick plan that was found in the time.
    """
    updates = sorted(find_backward_updates(profile), key=lambda update: (update.before, update.tick))
    if not updates:
        return choose_late_updates(profile, machine, budget_bytes, keep, time_limit_s), ()
    stop, half = monotonic() + BACKWARD_SHARE * time_limit_s, len(updates) // 2
    quick = _QuickPlans(profile, machine, budget_bytes, keep, stop)
    quick.try_places((), (), most_bound_ns=int(CLOSE * profile.compute_ns))
    backward = weights_of(updates)
    others = _other_late_weights(profile, backward)
    for late in (others, others[len(others) // 2 :], (), others[: len(others) // 2]):
        quick.try_places(late, backward)
    quick.try_places((), ())
    if not quick.best[2]:  # no update in the backward is faster than all
        for part in (updates[:half], updates[half:]):
            quick.try_places((), weights_of(part))
    return quick.best[1:]


def _other_late_weights(profile: Profile, backward: Collection[str]) -> tuple[str, ...]:
    """Return the weights that can be updated late if `backward` are updated in the backward. They are in the
    order in which the forward uses them.
    """
    step = profile_with_updates(profile, backward=backward)
    updates = [update for update in find_updates(step) if not {*backward}.intersection(update.weights)]
    return weights_of(sorted(updates, key=lambda update: (update.before, update.tick)))


@dataclass(slots=True)
class _QuickPlans:
    """Quick plans for several placements of updates.

    stop    after this time, no other placement is tried
    best    the shortest step, with its late weights and the weights that are updated in the backward
    """

    profile: Profile
    machine: Machine
    budget_bytes: int
    keep: Collection[str]
    stop: float
    best: tuple[int, tuple[str, ...], tuple[str, ...]] = (2**62, (), ())

    def try_places(self, late: Sequence[str], backward: Sequence[str], most_bound_ns: int = 2**62) -> None:
        """Make a quick plan, unless a bound shows that it is slower than the best plan. Make no plan if the
        bound exceeds `most_bound_ns`.
        """
        best_ns = self.best[0]
        is_late = best_ns < 2**62 and monotonic() > self.stop
        if is_late or best_ns <= CLOSE * self.profile.compute_ns:
            return
        tell_progress(f"{len(late)} weights are updated late, {len(backward)} in the backward")
        step = profile_with_updates(self.profile, late, backward)
        given = self.machine, self.budget_bytes, self.keep
        step_ns, _ = _quick_step_and_bound_ns(step, *given, min(most_bound_ns, best_ns))
        if step_ns < best_ns:
            self.best = step_ns, tuple(late), tuple(backward)


def _quick_step_and_bound_ns(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    keep: Collection[str],
    most_bound_ns: int = 2**62,
) -> tuple[int, int]:
    """Return the step of a quick plan, and the bound. Return huge numbers if there is no plan, or if the
    bound exceeds `most_bound_ns`.
    """
    problem = build_problem(profile, machine, keep)
    try:
        refuse_budget_below_floor(problem, budget_bytes)
        lower = lower_bound(problem, machine, budget_bytes, time_limit_s=BOUND_S, refined=False)
        if lower.step_ns > most_bound_ns:
            return 2**62, 2**62
        step_ns, _ = quick_greedy_plan(lower.add_hints(problem), machine, budget_bytes, lower.step_ns)
        return step_ns, lower.step_ns
    except PlanError:
        return 2**62, 2**62
