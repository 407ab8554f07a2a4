"""The conversion of plans to arrays of integers for the native search.

In: a problem and a plan. Out: arrays of integers. The module also converts such arrays back to a plan.

A gap is an idle interval of a tensor. In each gap the tensor is evicted at most one time. The four integers
of a gap are (evicted, out, free, trigger):

    evicted    1 if the tensor is evicted in the gap, otherwise 0
    out        the tick at which the write is issued
    free       the tick from which the tensor's bytes are free
    trigger    the tick at which the fetch is issued

The ticks count from the start of the step in which the gap begins (picture in csrc/planner/absences.h). A
tensor has one tier. After a kernel has written a tensor, the first eviction writes a copy to the tier. Later
evictions of the same contents only drop the tensor. Each fetch is ready at the end of its gap.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from teraio.formats.plan import Evict, Fetch, Home, Move, Plan

from ..problem.problem import DEVICE, Bytes, Gap, Problem, transfer_ns

NO_ROUTE = -1


@dataclass(frozen=True, slots=True)
class GapIndex:
    """The gaps in which a tensor can be evicted and fetched.

    A version is the contents of a tensor from one write to the next. Each gap has a version, and an age: the
    ticks since the write.
    """

    problem: Problem
    gaps: tuple[Gap, ...]
    ages: tuple[int, ...]  # by gap: ticks from the tensor's last write to the gap
    versions: tuple[int, ...]  # by gap: a number for (tensor, version); -1 if no kernel writes the tensor


@dataclass(slots=True)
class IndexedPlan:
    """The decisions of a plan, as integers.

    `absences` has (evicted, out, free, trigger) of each gap. `routes` has the route of each tensor. `homes`
    has the tensors that are in a slow tier between steps although the plan does not move them.
    """

    absences: list[tuple[int, int, int, int]]
    routes: list[int]
    homes: list[Home] = field(default_factory=list)


def index_gaps(problem: Problem) -> GapIndex:
    gaps = tuple(gap for gap in problem.gaps if not gap.unused)
    numbers: dict[tuple[int, int], int] = {}
    versions = [
        NO_ROUTE if gap.version is None else numbers.setdefault((gap.tensor, gap.version), len(numbers))
        for gap in gaps
    ]
    return GapIndex(
        problem, gaps, tuple(gap.ticks_since_write(problem.ticks_per_step) for gap in gaps), tuple(versions)
    )


def index_plan(index: GapIndex, plan: Plan) -> IndexedPlan | None:
    """Return the plan as an IndexedPlan.

    Return None if an IndexedPlan cannot express the plan. For example, the plan evicts a tensor twice in one
    gap, or evicts a tensor to several tiers.
    """
    problem, ticks = index.problem, index.problem.ticks_per_step
    tiers = {route.tier: number for number, route in enumerate(problem.routes)}
    moves: dict[str, list[Move]] = defaultdict(list)
    for move in plan.moves:
        moves[move.tensor].append(move)
    position = IndexedPlan([], [NO_ROUTE] * len(problem.profile.tensors))
    placed = 0
    for gap in index.gaps:
        tensor = problem.profile.tensors[gap.tensor]
        inside = [
            (at, move)
            for move in moves.get(tensor.name, ())
            for at in _ticks_of_move_within_gap(gap, move, ticks)
        ]
        evicts = [(at, move) for at, move in inside if isinstance(move, Evict)]
        fetches = [(at, move) for at, move in inside if isinstance(move, Fetch)]
        if not evicts and not fetches:
            position.absences.append((0, 0, 0, 0))
            continue
        if len(evicts) != 1 or len(fetches) != 1:
            return None
        (free, evict), (trigger, fetch) = evicts[0], fetches[0]
        if {evict.to, fetch.source} != {fetch.source} or fetch.source not in tiers or free > trigger:
            return None
        placed += 2
        if free == trigger:
            position.absences.append((0, 0, 0, 0))
            continue
        out = gap.start + 1 if evict.trigger is None else free - (evict.free - evict.trigger)
        position.absences.append((1, out, free, trigger))
        route = tiers[fetch.source]
        if position.routes[gap.tensor] not in (NO_ROUTE, route):
            return None
        position.routes[gap.tensor] = route
    moving = set(moves)
    position.homes = [home for home in plan.homes if home.tensor not in moving and home.tier != DEVICE]
    return position if placed == len(plan.moves) else None


def _ticks_of_move_within_gap(gap: Gap, move: Move, ticks: int) -> list[int]:
    """Return the ticks at which the move acts within the gap, counted from the gap's step.

    A fetch acts at its `trigger`. An eviction acts at its `free`, which lies before the gap's end.
    """
    tick = (move.free if isinstance(move, Evict) else move.trigger) % ticks
    last = gap.end - 1 if isinstance(move, Evict) else gap.end
    return [at for at in (tick, tick + ticks) if gap.start < at <= last]


def plan_from_indices(index: GapIndex, position: IndexedPlan, budget_bytes: int) -> Plan:
    """Return the plan of these decisions. The moves are in the order in which the native search simulated
    them.

    If a tensor is evicted at the end of the step, its home is the slow tier that holds it.
    """
    problem, ticks = index.problem, index.problem.ticks_per_step
    tensors = problem.profile.tensors
    writers: dict[int, tuple[int, int]] = {}
    for number, absence in enumerate(position.absences):
        version = index.versions[number]
        if absence[0] and version >= 0:
            writers[version] = min(writers.get(version, (ticks, 0)), (index.ages[number], number))
    issued: list[tuple[tuple[int, int, bool, int, int], Move]] = []
    homes = list(position.homes)
    for number, (gap, absence) in enumerate(zip(index.gaps, position.absences)):
        evicted, out, free, trigger = absence
        if not evicted:
            continue
        name, tier = tensors[gap.tensor].name, problem.routes[position.routes[gap.tensor]].tier
        if writers.get(index.versions[number], (0, -1))[1] == number:
            shift = out // ticks * ticks
            evict = Evict(name, tier, free - shift, out - shift)
            issued.append(((out % ticks, 0, False, 0, number), evict))
        else:
            issued.append(((free % ticks, 0, False, 0, number), Evict(name, tier, free % ticks)))
        shift = trigger // ticks * ticks
        fetch = Fetch(name, tier, trigger - shift, gap.end - shift)
        need = gap.end % ticks
        issued.append(((fetch.trigger, 1, need < fetch.trigger, need, number), fetch))
        if free < ticks <= gap.end:
            homes.append(Home(name, tier))
    issued.sort(key=lambda entry: entry[0])
    moves = tuple(move for _, move in issued)
    return Plan("", "search", budget_bytes, tuple(sorted(homes, key=lambda home: home.tensor)), moves)


@dataclass(frozen=True, slots=True)
class SearchArrays:
    """The problem as arrays for the native search.

    Building the arrays raises OverflowError if a number needs more than 64 bits.
    """

    durations_ns: Bytes
    live_bytes: Bytes
    gaps: Bytes
    lives: Bytes
    capacities_bytes: Bytes
    held_bytes: Bytes
    write_ns: Bytes
    read_ns: Bytes


def build_search_arrays(index: GapIndex, homes: list[Home]) -> SearchArrays:
    problem, ticks = index.problem, index.problem.ticks_per_step
    tensors, routes = problem.profile.tensors, problem.routes
    lives = []
    for tensor in tensors:
        first, end = tensor.life(ticks)
        lives.append((first, end) if first < end else (0, ticks))
    held = np.zeros((len(routes), ticks), np.int64)
    sizes = {tensor.name: tensor.size_bytes for tensor in tensors}
    for home in homes:
        for number, route in enumerate(routes):
            if route.tier == home.tier:
                held[number] += sizes[home.tensor]
    # `problem.live` counts every tensor that no kernel uses as resident. Some of these tensors are in a slow
    # tier. Subtract their bytes.
    live = problem.live - sum(sizes[home.tensor] for home in homes)
    gaps = [
        (gap.tensor, gap.start, gap.end, version, age, gap.size_bytes)
        for gap, version, age in zip(index.gaps, index.versions, index.ages)
    ]
    writes = [transfer_ns(route.out, gap.size_bytes) for gap in index.gaps for route in routes]
    reads = [transfer_ns(route.back, gap.size_bytes) for gap in index.gaps for route in routes]
    return SearchArrays(
        np.array([kernel.duration_ns for kernel in problem.profile.kernels], np.int64),
        np.array(live, np.int64),
        np.array(gaps, np.int64).reshape(-1, 6),
        np.array(lives, np.int64).reshape(-1, 2),
        np.array([route.capacity_bytes for route in routes], np.int64),
        held.reshape(-1),
        np.array(writes, np.int64),
        np.array(reads, np.int64),
    )
