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

from ..greedy.choose import no_room
from ..problem.problem import Bytes, Ledger, Problem, Route, transfer_ns
from .common import Away, Bins, Tiers, plan_of, start
from .g10 import SSD_FIRST, absences, ordered


def teraio_paper(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Nothing is left to chance: `seed` changes nothing. Past its time the rest of the choices wait."""
    stop = monotonic() + time_limit_s
    bins, (tiers, ledger) = Bins(problem, machine), start(problem)
    routes = ordered(problem, SSD_FIRST)

    def behind_kernels(index: int) -> Iterable[Away]:
        return absences(problem, index, bins, tiers) if monotonic() < stop else ()

    def waited_for(index: int) -> Iterable[Away]:
        gap = problem.gaps[index]
        # No time is left behind kernels on the SSD's links: the host takes what it has room for.
        route = next((route for route in reversed(routes) if tiers.has_room(gap, route)), None)
        return (Away(index, route, gap.start + 1, gap.end),) if route else ()

    chosen = _best_first(problem, budget_bytes, ledger, tiers, behind_kernels, bins, set())
    urgent = _best_first(
        problem, budget_bytes, ledger, tiers, waited_for, None, {away.gap for away in chosen}
    )
    if (ledger.rows > budget_bytes).any():  # chosen ones too, for all of their gaps
        for away in chosen:
            gap = problem.gaps[away.gap]
            ledger.add(gap.start + 1, away.free, -gap.size_bytes)
            ledger.add(away.trigger, gap.end, -gap.size_bytes)
            away.free, away.trigger = gap.start + 1, gap.end
        urgent += _best_first(
            problem, budget_bytes, ledger, tiers, waited_for, None, {away.gap for away in (*chosen, *urgent)}
        )
        urgent += chosen
        chosen = []
    if (ledger.rows > budget_bytes).any():
        raise no_room(problem, budget_bytes)
    _give_room(problem, urgent, ledger, budget_bytes, Bins(problem, machine))
    return plan_of(problem, [*chosen, *urgent], tiers, budget_bytes, "teraio-paper", "memory is full")


def _best_first(
    problem: Problem,
    budget_bytes: int,
    ledger: Ledger,
    tiers: Tiers,
    candidates: Callable[[int], Iterable[Away]],
    bins: Bins | None,
    taken: set[int],
) -> list[Away]:
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
            above: Bytes = ledger.window(away.free, away.trigger) - budget_bytes
            lasting = slots[np.arange(away.free, away.trigger) % ticks]
            benefit = float((np.clip(above, 0, gap.size_bytes) * lasting).sum())
            if benefit > 0:
                break
        else:
            continue
        entry = (-benefit / _cost_ns(away.route, gap.size_bytes), index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        if bins is not None:
            bins.take(away.route.out, gap.start + 1, away.free, gap.size_bytes)
            bins.take(away.route.back, away.trigger, gap.end, gap.size_bytes, backwards=True)
        tiers.place(gap, away.route)
        ledger.add(away.free, away.trigger, -gap.size_bytes)
        aways.append(away)
    return aways


def _cost_ns(route: Route, size_bytes: int) -> int:
    return max(transfer_ns(route.out, size_bytes) + transfer_ns(route.back, size_bytes), 1)


def _give_room(problem: Problem, urgent: list[Away], ledger: Ledger, budget_bytes: int, empty: Bins) -> None:
    """Where memory allows, first the time that each transfer takes on an empty link, then all there is for
    reads: what is urgent is under way at once, and a kernel waits only where its room is needed."""
    by_end = sorted(urgent, key=lambda a: (problem.gaps[a.gap].end, a.gap))

    def fetch_from(away: Away, wanted: int) -> None:
        size = problem.gaps[away.gap].size_bytes
        earlier = ledger.earliest(max(wanted, away.free), away.trigger, size, budget_bytes)
        ledger.add(earlier, away.trigger, size)
        away.trigger = min(earlier, away.trigger)

    for away in by_end:
        gap, route = problem.gaps[away.gap], away.route
        fetch_from(away, empty.last_start(route.back, gap.start + 1, gap.end, gap.size_bytes))
        done = empty.first_done(route.out, gap.start + 1, gap.end, gap.size_bytes)
        later = ledger.latest(away.free, min(done, away.trigger), gap.size_bytes, budget_bytes)
        ledger.add(away.free, later, gap.size_bytes)
        away.free = max(later, away.free)
    for away in by_end:
        fetch_from(away, away.free)
