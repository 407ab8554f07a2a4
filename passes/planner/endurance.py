"""Plans that keep to a limit for bytes written to SSDs per day: the cap.

In: a planner. Out: the plan with the shortest step. A step is at least as long as its writes take at the rate
of the cap.

The cap limits the sum of all writes, and not the speed of a single write. The cap is therefore no bandwidth.
But a planner that sees slower links to the SSDs evicts clean, large and long idle tensors, and therefore
writes less. The planner runs up to three times: for the real machine, for a machine whose links write at the
rate of the cap, and for a machine in between. Each plan is simulated on the real machine.
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
# Share of the time for the plan on the real machine. If this plan keeps to the cap, no other plan is made.
FIRST_SHARE = 0.5
LATER_SHARE = 0.25  # share of the time for each slower machine


def plan_within_write_cap(
    make: Callable[[Machine, float], Plan],
    profile: Profile,
    machine: Machine,
    per_day_bytes: int,
) -> Plan:
    """Return the plan with the shortest step that keeps to the cap.

    `make` takes a machine and a share of the time, and returns a plan for that machine. The plan's predicted
    step is that on the real machine.
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
    """Yield two machines that differ from this machine only by slower links to the SSDs.

    In the first machine a link has the geometric mean of its bandwidth and the rate of the cap. In the second
    machine a link has the rate of the cap.
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
    plan, step = apply_plan_recompute(plan, profile)
    return sum(moved_bytes_by_kind(plan, step, "ssd", evict=True).values())


def _shortest_allowed_step_ns(plan: Plan, profile: Profile, per_day_bytes: int) -> int:
    """Return the shortest step time at which the writes keep to the cap."""
    return -(-ssd_bytes_written_per_step(plan, profile) * DAY_NS // per_day_bytes)


def _stretch_step_to_cap(plan: Plan, profile: Profile, per_day_bytes: int) -> Plan:
    step_ns = max(plan.predicted.step_ns, _shortest_allowed_step_ns(plan, profile, per_day_bytes))
    return replace(plan, predicted=replace(plan.predicted, step_ns=step_ns))
