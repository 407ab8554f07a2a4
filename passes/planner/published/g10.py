"""G10 as published. In: a problem. Out: a plan that hides every transfer behind kernels, or a refusal.

Source: Zhang et al., MICRO 2023 (arXiv 2310.09443), and its code, platformxlab/G10, src/analysis.cc:

    candidates    section 4.2: every inactive period of every tensor, those around the end of the step too
    order         section 4.3; analysis.cc 3164-3480: the period that takes most bytes x time off the part of
                  the step that is above the budget first, then the longer and larger; looked at again after
                  each choice, because both memory and links have changed
    eviction      begins with the period, and ends when the link's bytes per kernel, less what is promised
                  already, add up to the tensor; to the SSD if that leaves an absence, else to the host while
                  it has room, else the period is left out (section 4.3, "smart tensor eviction")
    prefetch      as late as the link's bytes allow, then earlier wherever memory has room (section 4.4)
    no waiting    there is no variable for it: if memory is still above the budget the run faults on pages

Every eviction is a write, also of what has not changed. The paper's page tables and faults are not modelled:
above the budget there is no plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from time import monotonic

import numpy as np

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan

from ..problem.problem import Problem, Route
from .common import Absence, LinkCapacity, TierRoom, plan_of_absences, tiers_and_ledger_without_unused

SSD_FIRST = ("ssd", "host")  # analysis.cc: the host takes what the SSD's bandwidth does not


def g10(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Nothing is left to chance: `seed` changes nothing."""
    stop = monotonic() + time_limit_s
    bins, (tiers, ledger) = LinkCapacity(problem, machine), tiers_and_ledger_without_unused(problem)
    slots = np.array([kernel.duration_ns + 1 for kernel in problem.profile.kernels] or [1], np.float64)
    aways: list[Absence] = []
    # Areas shrink while memory falls and links fill, so an entry that is still the largest after it has been
    # worked out again is the largest of all: the order is that of sorting everything again each time, but for
    # a period that gains time where it goes over from the SSD to the host.
    heap = [(-float("inf"), 0.0, index) for index, gap in enumerate(problem.gaps) if not gap.unused]
    heapq.heapify(heap)
    while heap and (ledger.rows > budget_bytes).any() and monotonic() < stop:
        *_, index = heapq.heappop(heap)
        gap = problem.gaps[index]
        for away in stall_free_absences(problem, index, bins, tiers):
            over = np.where(ledger.rows_between(away.free, away.trigger) > budget_bytes, 1.0, 0.0)
            lasting = slots[np.arange(away.free, away.trigger) % len(slots)]
            area = float((over * lasting).sum()) * gap.size_bytes
            if area > 0:
                break
        else:
            continue
        entry = (-area, -float((gap.end - gap.start) * gap.size_bytes), index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        bins.commit_transfer(away.route.out, gap.start + 1, away.free, gap.size_bytes)
        bins.commit_transfer(away.route.back, away.trigger, gap.end, gap.size_bytes, backwards=True)
        tiers.assign_tier(gap, away.route)
        ledger.add_bytes_between(away.free, away.trigger, -gap.size_bytes)
        aways.append(away)
    for away in sorted(aways, key=lambda a: (problem.gaps[a.gap].end, a.gap)):
        size = problem.gaps[away.gap].size_bytes
        earlier = ledger.earliest_tick_with_room(away.free, away.trigger, size, budget_bytes)
        ledger.add_bytes_between(earlier, away.trigger, size)
        away.trigger = earlier
    fails = "it has no way to wait for a transfer, so it faults on pages there"
    return plan_of_absences(problem, aways, tiers, budget_bytes, "g10", fails)


def stall_free_absences(
    problem: Problem, index: int, bins: LinkCapacity, tiers: TierRoom
) -> Iterator[Absence]:
    """From when to when the bytes can be gone if write and read run behind kernels, tier by tier."""
    gap = problem.gaps[index]
    for route in routes_in_tier_order(problem, SSD_FIRST):
        if tiers.has_room(gap, route):
            free = bins.first_tick_transfer_is_done(route.out, gap.start + 1, gap.end, gap.size_bytes)
            trigger = bins.last_tick_to_start_transfer(route.back, free, gap.end, gap.size_bytes)
            if free < trigger:
                yield Absence(index, route, free, trigger)


def routes_in_tier_order(problem: Problem, names: tuple[str, ...]) -> list[Route]:
    """Routes in the order of these tier names (`ssd0`, `ssd1` are `ssd`); others are not used."""
    return [route for name in names for route in problem.routes if route.tier.rstrip("0123456789") == name]
