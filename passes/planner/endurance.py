"""Plans that keep to a cap on bytes written per day. In: who plans. Out: the plan with the shortest step, a
step being no shorter than its writes allow.

A drive carries each write as fast as ever, and it is their sum that is capped. So the cap is no bandwidth;
but a planner that is told of slower links away from the device chooses what is clean, large and long away,
and writes less. It is asked for the machine as it is, for one that writes at the rate of the cap, and for one
in between; each plan is judged on the machine as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isqrt

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, moved_bytes_by_kind
from teraio.formats.profile import Profile
from teraio.formats.recompute import apply_plan_recompute

DAY_NS = 86_400 * 10**9
FIRST_SHARE = 0.5  # of the time; if it keeps to the cap it is the only one
LATER_SHARE = 0.25


def plan_within_write_cap(
    make: Callable[[Machine, float], Plan],
    profile: Profile,
    machine: Machine,
    per_day_bytes: int,
) -> Plan:
    """`make` plans for a machine in a share of the time, and predicts on the one it was made for here."""
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
    """The machine with links to the SSDs that write ever more slowly, down to what the cap allows."""
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
    """To the SSDs, per step."""
    plan, step = apply_plan_recompute(plan, profile)
    return sum(moved_bytes_by_kind(plan, step, "ssd", evict=True).values())


def _shortest_allowed_step_ns(plan: Plan, profile: Profile, per_day_bytes: int) -> int:
    """How long a step must take for its writes to be within the cap."""
    return -(-ssd_bytes_written_per_step(plan, profile) * DAY_NS // per_day_bytes)


def _stretch_step_to_cap(plan: Plan, profile: Profile, per_day_bytes: int) -> Plan:
    step_ns = max(plan.predicted.step_ns, _shortest_allowed_step_ns(plan, profile, per_day_bytes))
    return replace(plan, predicted=replace(plan.predicted, step_ns=step_ns))
