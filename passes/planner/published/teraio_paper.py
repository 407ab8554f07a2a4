"""The greedy of the TERAIO paper. In: a problem. Out: a plan; kernels wait where links do not keep up.

Source: "TERAIO: Cost-Efficient LLM Training with Lifetime-Aware Tensor Offloading via GPUDirect Storage",
NeurIPS 2025 (arXiv 2506.06472), section 3.2 and algorithm 1; its code was not published:

    line 1-3        candidates: a tensor and one of its inactive periods; memory required at each kernel
    line 4-5, 16-17 bandwidth promised before shrinks the period to [offloaded, prefetch]
    line 6-8        benefit: the integral of what the absence takes off the part of memory above capacity;
                    cost: the time of its offload and of its prefetch; the best ratio first
    line 9-11       its bandwidth is committed, until required memory is below capacity
    destination     the SSD first; the host, up to its capacity, where the SSD's bandwidth is used up
    urgent          what still does not fit makes kernels wait; such transfers are served first

Every eviction is a write: the paper does not tell changed tensors from others.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from time import monotonic

import numpy as np

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan

from ..greedy.choose import no_tier_room_error
from ..problem.problem import Bytes, BytesByTick, Problem, Route, transfer_ns
from .common import Absence, LinkCapacity, TierRoom, plan_of_absences, tiers_and_ledger_without_unused
from .g10 import SSD_FIRST, routes_in_tier_order, stall_free_absences


def teraio_paper(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Nothing is left to chance: `seed` changes nothing. Past its time the rest of the choices wait."""
    stop = monotonic() + time_limit_s
    bins, (tiers, ledger) = LinkCapacity(problem, machine), tiers_and_ledger_without_unused(problem)
    routes = routes_in_tier_order(problem, SSD_FIRST)

    def stall_free_candidates(index: int) -> Iterable[Absence]:
        return stall_free_absences(problem, index, bins, tiers) if monotonic() < stop else ()

    def stalling_candidates(index: int) -> Iterable[Absence]:
        gap = problem.gaps[index]
        # No time is left behind kernels on the SSD's links: the host takes what it has room for.
        route = next((route for route in reversed(routes) if tiers.has_room(gap, route)), None)
        return (Absence(index, route, gap.start + 1, gap.end),) if route else ()

    chosen = _choose_best_absences(problem, budget_bytes, ledger, tiers, stall_free_candidates, bins, set())
    urgent = _choose_best_absences(
        problem, budget_bytes, ledger, tiers, stalling_candidates, None, {away.gap for away in chosen}
    )
    if (ledger.rows > budget_bytes).any():  # chosen ones too, for all of their gaps
        for away in chosen:
            gap = problem.gaps[away.gap]
            ledger.add_bytes_between(gap.start + 1, away.free, -gap.size_bytes)
            ledger.add_bytes_between(away.trigger, gap.end, -gap.size_bytes)
            away.free, away.trigger = gap.start + 1, gap.end
        urgent += _choose_best_absences(
            problem,
            budget_bytes,
            ledger,
            tiers,
            stalling_candidates,
            None,
            {away.gap for away in (*chosen, *urgent)},
        )
        urgent += chosen
        chosen = []
    if (ledger.rows > budget_bytes).any():
        raise no_tier_room_error(problem, budget_bytes)
    _shorten_absences(problem, urgent, ledger, budget_bytes, LinkCapacity(problem, machine))
    return plan_of_absences(
        problem, [*chosen, *urgent], tiers, budget_bytes, "teraio-paper", "memory is full"
    )


def _choose_best_absences(
    problem: Problem,
    budget_bytes: int,
    ledger: BytesByTick,
    tiers: TierRoom,
    candidates: Callable[[int], Iterable[Absence]],
    bins: LinkCapacity | None,
    taken: set[int],
) -> list[Absence]:
    """Lines 6 to 11. Benefits only shrink, so what is still the best after it has been worked out again is
    the best of all. Without `bins` no bandwidth is committed: kernels will wait."""
    slots = np.array([kernel.duration_ns + 1 for kernel in problem.profile.kernels] or [1], np.float64)
    ticks, aways = len(slots), []
    heap = [
        (-float("inf"), index)
        for index, gap in enumerate(problem.gaps)
        if not gap.unused and index not in taken
    ]
    heapq.heapify(heap)
    while heap and (ledger.rows > budget_bytes).any():
        _, index = heapq.heappop(heap)
        gap = problem.gaps[index]
        for away in candidates(index):
            above: Bytes = ledger.rows_between(away.free, away.trigger) - budget_bytes
            lasting = slots[np.arange(away.free, away.trigger) % ticks]
            benefit = float((np.clip(above, 0, gap.size_bytes) * lasting).sum())
            if benefit > 0:
                break
        else:
            continue
        entry = (-benefit / _round_trip_ns(away.route, gap.size_bytes), index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        if bins is not None:
            bins.commit_transfer(away.route.out, gap.start + 1, away.free, gap.size_bytes)
            bins.commit_transfer(away.route.back, away.trigger, gap.end, gap.size_bytes, backwards=True)
        tiers.assign_tier(gap, away.route)
        ledger.add_bytes_between(away.free, away.trigger, -gap.size_bytes)
        aways.append(away)
    return aways


def _round_trip_ns(route: Route, size_bytes: int) -> int:
    return max(transfer_ns(route.out, size_bytes) + transfer_ns(route.back, size_bytes), 1)


def _shorten_absences(
    problem: Problem, urgent: list[Absence], ledger: BytesByTick, budget_bytes: int, empty: LinkCapacity
) -> None:
    """Where memory allows, first the time that each transfer takes on an empty link, then all there is for
    reads: what is urgent is under way at once, and a kernel waits only where its room is needed."""
    by_end = sorted(urgent, key=lambda a: (problem.gaps[a.gap].end, a.gap))

    def fetch_earlier(away: Absence, wanted: int) -> None:
        size = problem.gaps[away.gap].size_bytes
        earlier = ledger.earliest_tick_with_room(max(wanted, away.free), away.trigger, size, budget_bytes)
        ledger.add_bytes_between(earlier, away.trigger, size)
        away.trigger = min(earlier, away.trigger)

    for away in by_end:
        gap, route = problem.gaps[away.gap], away.route
        fetch_earlier(
            away, empty.last_tick_to_start_transfer(route.back, gap.start + 1, gap.end, gap.size_bytes)
        )
        done = empty.first_tick_transfer_is_done(route.out, gap.start + 1, gap.end, gap.size_bytes)
        later = ledger.latest_tick_with_room(away.free, min(done, away.trigger), gap.size_bytes, budget_bytes)
        ledger.add_bytes_between(away.free, later, gap.size_bytes)
        away.free = max(later, away.free)
    for away in by_end:
        fetch_earlier(away, away.free)
