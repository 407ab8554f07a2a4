"""G10 as published. In: a problem. Out: a plan that hides every transfer behind kernels, or PlanError.

Source: Zhang et al., MICRO 2023 (arXiv 2310.09443), and its code, platformxlab/G10, src/analysis.cc:

    candidates    section 4.2: every inactive period of every tensor, including periods around the step's end
    order         section 4.3; analysis.cc 3164-3480: the period with the largest area comes first. The area
                  is the tensor's bytes x the time for which memory is above the budget meanwhile. Of equal
                  periods, the period with more bytes x ticks comes first. Each choice changes memory and
                  links, so the order is computed again after each choice.
    eviction      section 4.3, "smart tensor eviction": the write begins when the period begins. It ends as
                  soon as the link has carried the tensor's bytes, beside its other transfers. The target is
                  the SSD if the write and the later read fit into the period, otherwise the host. If the host
                  has no room either, the tensor is kept resident in this period.
    prefetch      section 4.4: first as late as the link allows, then as early as memory has room
    no waiting    kernels never wait for a transfer; if memory is above the budget after all choices, the real
                  system has page faults

Every eviction is a write, even of a tensor that has not changed. The planner does not model the paper's page
tables and page faults. If memory is above the budget after all choices, the planner raises PlanError.
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

SSD_FIRST = ("ssd", "host")  # as in analysis.cc: the host gets a tensor only if the SSD's links have no time


def g10(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Return G10's plan. Nothing is random, so `seed` is unused."""
    stop = monotonic() + time_limit_s
    bins, (tiers, ledger) = LinkCapacity(problem, machine), tiers_and_ledger_without_unused(problem)
    slots = np.array([kernel.duration_ns + 1 for kernel in problem.profile.kernels] or [1], np.float64)
    absences: list[Absence] = []
    # The heap is sorted by area: the tensor's bytes x the time above the budget. Each choice frees memory and
    # fills links, so all areas shrink. An area in the heap may therefore be old and too large, but not too
    # small. The loop computes the first area again. If this area is still the largest, no other area can be
    # larger. One exception exists: a period may gain time if its target changes from the SSD to the host.
    heap = [(-float("inf"), 0.0, index) for index, gap in enumerate(problem.gaps) if not gap.unused]
    heapq.heapify(heap)
    while heap and (ledger.rows > budget_bytes).any() and monotonic() < stop:
        *_, index = heapq.heappop(heap)
        gap = problem.gaps[index]
        for absence in stall_free_absences(problem, index, bins, tiers):
            over = np.where(ledger.rows_between(absence.free, absence.trigger) > budget_bytes, 1.0, 0.0)
            lasting = slots[np.arange(absence.free, absence.trigger) % len(slots)]
            area = float((over * lasting).sum()) * gap.size_bytes
            if area > 0:
                break
        else:
            continue
        entry = (-area, -float((gap.end - gap.start) * gap.size_bytes), index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        bins.commit_transfer(absence.route.out, gap.start + 1, absence.free, gap.size_bytes)
        bins.commit_transfer(absence.route.back, absence.trigger, gap.end, gap.size_bytes, backwards=True)
        tiers.assign_tier(gap, absence.route)
        ledger.add_bytes_between(absence.free, absence.trigger, -gap.size_bytes)
        absences.append(absence)
    for absence in sorted(absences, key=lambda a: (problem.gaps[a.gap].end, a.gap)):
        size = problem.gaps[absence.gap].size_bytes
        earlier = ledger.earliest_tick_with_room(absence.free, absence.trigger, size, budget_bytes)
        ledger.add_bytes_between(earlier, absence.trigger, size)
        absence.change_trigger(earlier)
    fails = "it has no way to wait for a transfer, so it faults on pages there"
    return plan_of_absences(problem, absences, tiers, budget_bytes, "g10", fails)


def stall_free_absences(
    problem: Problem, index: int, bins: LinkCapacity, tiers: TierRoom
) -> Iterator[Absence]:
    """Yield, for each tier with room, the longest time for which the tensor can be evicted without a wait.

    The write and the read both run while other kernels run.
    """
    gap = problem.gaps[index]
    for route in routes_in_tier_order(problem, SSD_FIRST):
        if tiers.has_room(gap, route):
            free = bins.first_tick_transfer_is_done(route.out, gap.start + 1, gap.end, gap.size_bytes)
            trigger = bins.last_tick_to_start_transfer(route.back, free, gap.end, gap.size_bytes)
            if free < trigger:
                yield Absence(index, route, free, trigger)


def routes_in_tier_order(problem: Problem, names: tuple[str, ...]) -> list[Route]:
    """Return the routes to the tiers with these names, in the order of `names`.

    Digits at the end of a tier's name are ignored: `ssd0` and `ssd1` both have the name `ssd`.
    """
    return [route for name in names for route in problem.routes if route.tier.rstrip("0123456789") == name]
