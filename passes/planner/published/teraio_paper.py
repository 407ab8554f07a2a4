"""The greedy algorithm of the TERAIO paper.

In: a problem. Out: a plan. Kernels wait for transfers if the links are too slow.

Source: "TERAIO: Cost-Efficient LLM Training with Lifetime-Aware Tensor Offloading via GPUDirect Storage",
NeurIPS 2025 (arXiv 2506.06472), section 3.2 and algorithm 1; its code was not published:

    line 1-3        a candidate is a tensor and one of its inactive periods. The algorithm also computes the
                    memory that each kernel requires.
    line 4-5, 16-17 earlier choices have reserved bandwidth, so the offload ends later and the prefetch begins
                    earlier. Memory is saved only between this end and this begin.
    line 6-8        benefit: the bytes above capacity that the eviction removes, integrated over time.
                    Cost: the time of the offload plus the time of the prefetch.
                    The candidate with the highest ratio of benefit to cost comes first.
    line 9-11       bandwidth is reserved for the chosen candidate. Lines 6 to 11 repeat until the required
                    memory is below capacity.
    destination     the SSD; if the SSD's bandwidth is used up, the host, up to its capacity
    urgent          if memory is still above capacity, more tensors are evicted, and kernels wait for them.
                    The links serve the transfers of these tensors first.

Every eviction is a write, because the paper does not distinguish changed and unchanged tensors.
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
    """Return the paper's plan. Nothing is random, so `seed` is unused.

    After the time limit, the planner looks for no more evictions that hide behind kernels. Kernels wait for
    the transfers of all further evictions.
    """
    stop = monotonic() + time_limit_s
    bins, (tiers, ledger) = LinkCapacity(problem, machine), tiers_and_ledger_without_unused(problem)
    routes = routes_in_tier_order(problem, SSD_FIRST)

    def stall_free_candidates(index: int) -> Iterable[Absence]:
        return stall_free_absences(problem, index, bins, tiers) if monotonic() < stop else ()

    def stalling_candidates(index: int) -> Iterable[Absence]:
        gap = problem.gaps[index]
        # No more transfers of the SSD hide behind kernels. The host is therefore the first choice, while it
        # has room.
        route = next((route for route in reversed(routes) if tiers.has_room(gap, route)), None)
        return (Absence(index, route, gap.start + 1, gap.end),) if route else ()

    chosen = _choose_best_absences(problem, budget_bytes, ledger, tiers, stall_free_candidates, bins, set())
    urgent = _choose_best_absences(
        problem, budget_bytes, ledger, tiers, stalling_candidates, None, {absence.gap for absence in chosen}
    )
    if (ledger.rows > budget_bytes).any():  # evict each chosen tensor for the whole of its idle time
        for absence in chosen:
            gap = problem.gaps[absence.gap]
            ledger.add_bytes_between(gap.start + 1, absence.free, -gap.size_bytes)
            ledger.add_bytes_between(absence.trigger, gap.end, -gap.size_bytes)
            absence.change_free(gap.start + 1)
            absence.change_trigger(gap.end)
        urgent += _choose_best_absences(
            problem,
            budget_bytes,
            ledger,
            tiers,
            stalling_candidates,
            None,
            {absence.gap for absence in (*chosen, *urgent)},
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
    """Choose the times in which tensors are evicted, by lines 6 to 11 of the algorithm.

    Each choice can only lower the benefits of the other candidates. The loop computes the first candidate of
    the heap again. If this candidate is still the best, no other candidate can be better. If `bins` is None,
    no bandwidth is reserved, and kernels wait for the transfers.
    """
    slots = np.array([kernel.duration_ns + 1 for kernel in problem.profile.kernels] or [1], np.float64)
    ticks, absences = len(slots), []
    heap = [
        (-float("inf"), index)
        for index, gap in enumerate(problem.gaps)
        if not gap.unused and index not in taken
    ]
    heapq.heapify(heap)
    while heap and (ledger.rows > budget_bytes).any():
        _, index = heapq.heappop(heap)
        gap = problem.gaps[index]
        for absence in candidates(index):
            above: Bytes = ledger.rows_between(absence.free, absence.trigger) - budget_bytes
            lasting = slots[np.arange(absence.free, absence.trigger) % ticks]
            benefit = float((np.clip(above, 0, gap.size_bytes) * lasting).sum())
            if benefit > 0:
                break
        else:
            continue
        entry = (-benefit / _round_trip_ns(absence.route, gap.size_bytes), index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        if bins is not None:
            bins.commit_transfer(absence.route.out, gap.start + 1, absence.free, gap.size_bytes)
            bins.commit_transfer(absence.route.back, absence.trigger, gap.end, gap.size_bytes, backwards=True)
        tiers.assign_tier(gap, absence.route)
        ledger.add_bytes_between(absence.free, absence.trigger, -gap.size_bytes)
        absences.append(absence)
    return absences


def _round_trip_ns(route: Route, size_bytes: int) -> int:
    return max(transfer_ns(route.out, size_bytes) + transfer_ns(route.back, size_bytes), 1)


def _shorten_absences(
    problem: Problem, urgent: list[Absence], ledger: BytesByTick, budget_bytes: int, empty: LinkCapacity
) -> None:
    """Shorten the times in which urgent tensors are evicted, where memory allows it. Kernels then wait less.

    The first pass gives each transfer the time that it takes on an empty link. The second pass issues each
    fetch as early as memory allows.
    """
    by_end = sorted(urgent, key=lambda a: (problem.gaps[a.gap].end, a.gap))

    def fetch_earlier(absence: Absence, wanted: int) -> None:
        size = problem.gaps[absence.gap].size_bytes
        earlier = ledger.earliest_tick_with_room(
            max(wanted, absence.free), absence.trigger, size, budget_bytes
        )
        ledger.add_bytes_between(earlier, absence.trigger, size)
        absence.change_trigger(min(earlier, absence.trigger))

    for absence in by_end:
        gap, route = problem.gaps[absence.gap], absence.route
        fetch_earlier(
            absence, empty.last_tick_to_start_transfer(route.back, gap.start + 1, gap.end, gap.size_bytes)
        )
        done = empty.first_tick_transfer_is_done(route.out, gap.start + 1, gap.end, gap.size_bytes)
        later = ledger.latest_tick_with_room(
            absence.free, min(done, absence.trigger), gap.size_bytes, budget_bytes
        )
        ledger.add_bytes_between(absence.free, later, gap.size_bytes)
        absence.change_free(max(later, absence.free))
    for absence in by_end:
        fetch_earlier(absence, absence.free)
