"""Plans that keep to a *cap*: a limit for the bytes that are written to SSDs in a day.

In: a planner. Out: the plan with the shortest step. A step is at least so long that its writes, repeated all
day, keep to the cap.

The cap limits the sum of all writes, but not the speed of a single write. So a planner cannot treat the cap
as a bandwidth. However, on a machine with slower links to the SSDs, a planner writes fewer bytes. It then
prefers to evict tensors that are unchanged since their last write, large, or idle for long.

So the planner runs up to three times: for the real machine, for a machine whose links write at the rate of
the cap, and for a machine in between. The step time of each plan is simulated on the real machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isqrt

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, moved_bytes_by_kind
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile

DAY_NS = 86_400 * 10**9
# Share of the time limit for the plan for the real machine. If this plan keeps to the cap, no other plan is
# made.
FIRST_SHARE = 0.5
LATER_SHARE = 0.25  # share of the time limit for the plan for each slower machine


def plan_within_write_cap(
    make: Callable[[Machine, float], Plan],
    profile: Profile,
    machine: Machine,
    per_day_bytes: int,
) -> Plan:
    """Return the plan with the shortest step that keeps to the cap.

    `make` takes a machine and a share of the time limit, and returns a plan for this machine. The predicted
    step of the plan is the step on the real machine.
    """
    first = make(machine, FIRST_SHARE)
    if _shortest_allowed_step_ns(first, profile, per_day_bytes) <= first.predicted.step_ns:
        return first
    plans = [
        _stretch_step_to_cap(plan, profile, per_day_bytes)
        for plan in (
            first,
            *(make(other, LATER_SHARE) for other in machines_with_slower_writes(machine, per_day_bytes)),
        )
    ]
    best = min(plans, key=lambda plan: plan.predicted.step_ns)
    return replace(best, predicted=replace(best.predicted, bound_ns=first.predicted.bound_ns))


def machines_with_slower_writes(machine: Machine, per_day_bytes: int) -> Iterator[Machine]:
    """Yield two machines that differ from this machine only by slower writes to the SSDs.

    In the first machine, the bandwidth of each link to an SSD is the geometric mean of its own bandwidth and
    the rate of the cap. In the second machine, it is the rate of the cap. No link is faster than in this
    machine.
    """
    rate = max(per_day_bytes // 86_400, 1)

    def limited(now: int, between: bool) -> int:
        return min(now, isqrt(now * rate) if between else rate)

    for between in (True, False):
        links = tuple(
            replace(link, bandwidth_bytes_per_s=limited(link.bandwidth_bytes_per_s, between))
            if link.target.startswith("ssd")
            else link
            for link in machine.links
        )
        yield replace(machine, links=links)


def ssd_bytes_written_per_step(plan: Plan, profile: Profile) -> int:
    """Return the number of bytes that a plan writes to SSDs in each step."""
    plan, step = apply_plan_changes(plan, profile)
    return sum(moved_bytes_by_kind(plan, step, "ssd", evict=True).values())


def _shortest_allowed_step_ns(plan: Plan, profile: Profile, per_day_bytes: int) -> int:
    """Return the shortest step time at which the plan's writes, repeated all day, keep to the cap."""
    return -(-ssd_bytes_written_per_step(plan, profile) * DAY_NS // per_day_bytes)


def _stretch_step_to_cap(plan: Plan, profile: Profile, per_day_bytes: int) -> Plan:
    step_ns = max(plan.predicted.step_ns, _shortest_allowed_step_ns(plan, profile, per_day_bytes))
    return replace(plan, predicted=replace(plan.predicted, step_ns=step_ns))
