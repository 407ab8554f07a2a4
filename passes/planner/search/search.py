"""The search planner. In: a problem and a budget. Out: the best of the greedy plans, improved.

A large-neighbourhood search (csrc/planner/search.h) changes a few absences at a time where the simulated plan
stalls. Where it starts matters more than how long it goes on, so it starts from several plans of greedy's
portfolio and goes on with the better half, again and again. What it finds is never worse than what it starts
from. The same seed gives the same plan when it ends by `rounds`; by the clock it gets as far as the machine
lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING

import numpy as np

from teraio.formats.machine import Machine
from teraio.formats.plan import Home, Plan

if TYPE_CHECKING:
    from teraio import _native

from ..greedy.greedy import greedy_plans_with_periods
from ..problem.problem import Problem
from ..problem.progress_lines import show_best_step
from ..simulate.simulate import native_link_arrays, tick_entries_and_period
from .plan_index import (
    GapIndex,
    IndexedPlan,
    SearchArrays,
    build_search_arrays,
    index_gaps,
    index_plan,
    plan_from_indices,
)

_Started = tuple["_native.Search", list[Home]]
Progress = Callable[[int, int], None]  # the best step so far in ns, and how many plans were simulated

SLICE_NS = 50_000_000  # between two looks at the clock and at the heat
SLICE_ROUNDS = 500
STARTS = 8  # on 8B B16 80 GB 8 SSDs the second best start led to 14.03 s, the best to 14.22 s
START_SHARE = 0.4  # of the time, for greedy's portfolio: at 8B it takes about a second of ten
ROUNDS_MAX = 30_000  # on eight steps of Llama 8B nothing was gained after that
ROUNDS_PER_GAP = 20  # small steps are done long before the time is up
EMIT_S = 0.02  # for the simulation of what was found


def search(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Greedy's portfolio, then `best_plan_from_starts` for what is left of the time."""
    begun = monotonic()
    starts = best_greedy_plans_with_periods(
        problem, machine, budget_bytes, bound_ns, begun + START_SHARE * time_limit_s
    )
    if starts[0][0] <= bound_ns:
        return starts[0][1]
    return best_plan_from_starts(
        problem,
        machine,
        [plan for _, plan in starts],
        bound_ns=bound_ns,
        seed=seed,
        time_limit_s=max(begun + time_limit_s - monotonic(), EMIT_S),
        rounds=round_limit(problem),
    )


def best_greedy_plans_with_periods(
    problem: Problem, machine: Machine, budget_bytes: int, bound_ns: int, stop: float
) -> list[tuple[int, Plan]]:
    """The best few of greedy's portfolio, with their steps; the first that meets the bound ends it."""
    plans: list[tuple[int, Plan]] = []
    for plan, period_ns in greedy_plans_with_periods(problem, machine, budget_bytes, bound_ns):
        plans.append((period_ns, plan))
        if period_ns <= bound_ns or monotonic() > stop:
            break
    return sorted(plans, key=lambda each: each[0])[:STARTS]


def round_limit(problem: Problem) -> int:
    return min(ROUNDS_MAX, ROUNDS_PER_GAP * len(problem.gaps) + 1)


def best_plan_from_starts(
    problem: Problem,
    machine: Machine,
    starts: Sequence[Plan],
    *,
    bound_ns: int,
    seed: int = 0,
    time_limit_s: float = 0.0,
    rounds: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """The best plan found from `starts`, which keep their budget; the best of them if none is better.

    Ends after so many rounds or when the time is up, whichever is given and comes first, and when a plan
    meets the bound.
    """
    begun_ns = monotonic_ns()
    index = index_gaps(problem)
    best_ns, best = min(
        ((tick_entries_and_period(start, problem.profile, machine)[1], start) for start in starts),
        key=lambda each: each[0],
    )
    searches, arrays, each_ns = list[_Started](), dict[tuple[Home, ...], SearchArrays](), 0
    for start in starts:
        before_ns = monotonic_ns()
        found = _start_native_search(index, machine, start, seed, arrays)
        searches += [found] if found is not None else []
        each_ns = max(each_ns, monotonic_ns() - before_ns)
        if time_limit_s and monotonic_ns() - begun_ns > START_SHARE * time_limit_s * 1e9:
            break
    if best_ns <= bound_ns or not searches:
        return best
    # To write a plan down takes about as long as to read one.
    until_ns = max(begun_ns + int((time_limit_s - EMIT_S) * 1e9) - each_ns, begun_ns) if time_limit_s else 0
    winner, homes = _run_successive_halving(searches, _Race(bound_ns, rounds, begun_ns, until_ns, progress))
    if winner.best_ns >= best_ns:
        return best
    absences = [tuple(row) for row in winner.best().reshape(-1, 4).tolist()]
    position = IndexedPlan(absences, winner.best_routes().tolist(), homes)
    made = plan_from_indices(index, position, best.budget_bytes)
    made_ns = tick_entries_and_period(made, problem.profile, machine)[1]
    assert made_ns == winner.best_ns, (made_ns, winner.best_ns)
    return made


def _start_native_search(
    index: GapIndex, machine: Machine, start: Plan, seed: int, known: dict[tuple[Home, ...], SearchArrays]
) -> _Started | None:
    """The native search from a plan, and the homes it leaves alone; None if it cannot start there."""
    from teraio import _native

    position = index_plan(index, start)
    if position is None or not index.gaps or not index.problem.routes:
        return None
    links, homes = machine.links, tuple(position.homes)
    try:
        if homes not in known:
            known[homes] = build_search_arrays(index, position.homes)
        arrays = known[homes]
        found = _native.Search(
            arrays.durations_ns,
            arrays.live_bytes,
            start.budget_bytes,
            arrays.gaps,
            arrays.lives,
            arrays.capacities_bytes,
            arrays.held_bytes,
            arrays.write_ns,
            arrays.read_ns,
            np.array([links.index(route.out) for route in index.problem.routes], np.int64),
            np.array([links.index(route.back) for route in index.problem.routes], np.int64),
            *native_link_arrays(machine),
            np.array(position.absences, np.int64).reshape(-1, 4),
            np.array(position.routes, np.int64),
            seed % 2**64,
        )
    except OverflowError:  # links so slow that 64 bits do not hold a step
        return None
    return found, position.homes


@dataclass(slots=True)
class _Race:
    """Searches that go on in turn, and how far the whole has come, in rounds or in time."""

    bound_ns: int
    rounds: int  # 0: as many as there is time for
    begun_ns: int
    until_ns: int  # 0: however long it takes
    progress: Progress | None
    done: int = 0
    evaluations: int = 0
    best_ns: int = 0

    def share_spent(self) -> float:
        spent = self.done / self.rounds if self.rounds else 0.0
        if self.until_ns:
            spent = max(spent, (monotonic_ns() - self.begun_ns) / max(self.until_ns - self.begun_ns, 1))
        return spent

    def run_search_until_share(self, found: _native.Search, share: float) -> None:
        """One search, until this share of the whole is over; ever colder."""
        while found.best_ns > self.bound_ns and (gone := self.share_spent()) < share:
            before, rounds, stop_ns = found.evaluations, 2**62, 0
            if self.rounds:
                rounds = min(SLICE_ROUNDS, max(int(share * self.rounds) - self.done, 1))
            if self.until_ns:
                share_ns = self.begun_ns + int(share * (self.until_ns - self.begun_ns))
                stop_ns = min(monotonic_ns() + SLICE_NS, share_ns)
            ran = found.run(rounds, stop_ns, 1 - gone)
            self.done += ran
            self.evaluations += found.evaluations - before
            self.best_ns = min(self.best_ns or found.best_ns, found.best_ns)
            show_best_step("search", self.best_ns)
            if self.progress is not None:
                self.progress(self.best_ns, self.evaluations)
            if ran == 0:
                return


def _run_successive_halving(searches: list[_Started], race: _Race) -> _Started:
    """All go on for a while, then the better half, and so on; the best one gets half of the whole."""
    levels = (len(searches) - 1).bit_length()
    for level in range(levels + 1):
        first = level / (2 * levels) if levels else 0.0
        last = (level + 1) / (2 * levels) if level < levels else 1.0
        for number, (found, _) in enumerate(searches):
            race.run_search_until_share(found, first + (last - first) * (number + 1) / len(searches))
        searches = sorted(searches, key=lambda each: each[0].best_ns)[: max(len(searches) // 2, 1)]
    return searches[0]
