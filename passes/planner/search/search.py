"""The search planner. In: a problem and a budget. Out: the fastest plan found, starting from greedy's plans.

The search (csrc/planner/search.h) is a large-neighbourhood search. A round changes a few evictions near a
wait of the simulated plan. The plan at the start matters more than the number of rounds. Several searches
therefore start from several plans of the greedy planner. After some rounds the better half of the searches
continues, until one search is left.

The result is never slower than the best plan at the start. If the limit of rounds ends the search, the same
seed gives the same plan. If the time limit ends the search, the plan depends on the machine's speed.
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
Progress = Callable[[int, int], None]  # arguments: best step time so far in ns, number of simulated plans

SLICE_NS = 50_000_000  # time between two updates of the heat: how much worse a new plan may be
SLICE_ROUNDS = 500  # number of rounds between two updates of the heat
# The number of plans from which searches start. One plan is too few, as an example shows: a step of Llama 8B
# with batch 16, 80 GB and 8 SSDs. The search from the best plan ended with a step of 14.22 s. The search from
# the second best plan ended with 14.03 s.
STARTS = 8
START_SHARE = 0.4  # limit for greedy's plans, as a share of the time; Llama 8B needs about 1 of 10 s
ROUNDS_MAX = 30_000  # limit of rounds; with eight steps of Llama 8B, later rounds gained nothing
ROUNDS_PER_GAP = 20  # a lower limit for small steps: 20 rounds for each gap of the problem
EMIT_S = 0.02  # time reserved for the simulation of the final plan


def search(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Return the fastest plan: the best plan of the greedy planner, or a faster plan of the native search."""
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
    """Return the fastest plans of the greedy planner as (step time, plan), the fastest plan first.

    Make no more plans after a plan whose step time is at most the lower bound of all plans.
    """
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
    """Return the fastest plan that the search finds from `starts`, or the fastest plan of `starts`.

    Every plan in `starts` must be within its budget. The search ends in three cases: after `rounds` rounds,
    after the time limit, or if a step takes at most `bound_ns`. A limit of 0 means no limit.
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
    # Reserve time to build the final plan. The build takes about as long as the start of the slowest search.
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
    """Return a native search that starts from the plan `start`, and the homes of tensors that do not move.

    Return None if an IndexedPlan cannot express the plan, or if 64 bits cannot hold the plan's times.
    """
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
    except OverflowError:  # with very slow links, 64 bits cannot hold the step time
        return None
    return found, position.homes


@dataclass(slots=True)
class _Race:
    """The common limits of searches that run one after another, and the used part of these limits."""

    bound_ns: int
    rounds: int  # limit of rounds for all searches together; 0 means no limit
    begun_ns: int
    until_ns: int  # time at which all searches must end; 0 means no limit
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
        """Run one search until this share of the rounds or of the time is used up. All searches share both.

        The heat falls: at the end, the search accepts only plans that are hardly worse.
        """
        while found.best_ns > self.bound_ns and (spent := self.share_spent()) < share:
            before, rounds, stop_ns = found.evaluations, 2**62, 0
            if self.rounds:
                rounds = min(SLICE_ROUNDS, max(int(share * self.rounds) - self.done, 1))
            if self.until_ns:
                share_ns = self.begun_ns + int(share * (self.until_ns - self.begun_ns))
                stop_ns = min(monotonic_ns() + SLICE_NS, share_ns)
            ran = found.run(rounds, stop_ns, 1 - spent)
            self.done += ran
            self.evaluations += found.evaluations - before
            self.best_ns = min(self.best_ns or found.best_ns, found.best_ns)
            show_best_step("search", self.best_ns)
            if self.progress is not None:
                self.progress(self.best_ns, self.evaluations)
            if ran == 0:
                return


def _run_successive_halving(searches: list[_Started], race: _Race) -> _Started:
    """Run all searches for a while, then the better half, and so on until one search is left.

    The last search gets half of all rounds, or half of the time.
    """
    levels = (len(searches) - 1).bit_length()
    for level in range(levels + 1):
        first = level / (2 * levels) if levels else 0.0
        last = (level + 1) / (2 * levels) if level < levels else 1.0
        for number, (found, _) in enumerate(searches):
            race.run_search_until_share(found, first + (last - first) * (number + 1) / len(searches))
        searches = sorted(searches, key=lambda each: each[0].best_ns)[: max(len(searches) // 2, 1)]
    return searches[0]
