"""The planner `auto`. In: a problem and a budget. Out: the best plan of several planners.

    greedy    a portfolio of plans, guided by the relaxation; published systems add their plans in two
              cases: (1) no plan meets the bound, and gaps are few; (2) the best plan is far from the bound
    search    improves the best of these plans
    ilp       solves windows around the remaining stalls exactly, in the time that the search leaves

Each planner starts from the best plan so far, so the plan never gets worse. `auto` stops as soon as a plan
meets the bound. On small steps the search ends by its limit of rounds, long before the time limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from time import monotonic

from teraio.errors import PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Plan

from .exact import ilp
from .greedy.greedy import greedy_plans_with_periods
from .problem.problem import Problem
from .published.g10 import g10
from .published.tencache import tencache
from .published.teraio_paper import teraio_paper
from .published.zero_infinity import zero_infinity
from .search import search
from .simulate.simulate import tick_entries_and_period

CLOSE = 1.001  # if a plan takes at most this factor times the bound, the search stops
FIRST = 4  # number of plans of greedy's portfolio

# The planners of published systems run as well in two cases. (1) Gaps are few, and these planners therefore
# take nearly no time. (2) Greedy's plan is far from the bound.
OTHERS = (zero_infinity, tencache, g10, teraio_paper)
FEW = 400  # at most this number of gaps counts as few
FAR = 1.1  # factor of the bound: a plan beyond it is far from the bound
OTHERS_SHARE = 0.05  # share of the time limit for each of these planners
_Start = tuple[int, Plan]


def _published_plans(
    problem: Problem, machine: Machine, budget_bytes: int, time_limit_s: float
) -> Iterator[_Start]:
    """Yield (step time, plan) of each published system that finds a plan."""
    for other in OTHERS:
        share_s = OTHERS_SHARE * time_limit_s
        try:
            made = other(problem, machine, budget_bytes, bound_ns=0, seed=0, time_limit_s=share_s)
        except PlanError:
            continue
        yield tick_entries_and_period(made, problem.profile, machine)[1], made


def _step_ns_of_starting_plan(start: _Start) -> int:
    return start[0]


def quick_greedy_plan(
    problem: Problem, machine: Machine, budget_bytes: int, bound_ns: int
) -> tuple[int, Plan]:
    """Return (step time, plan) of the best of greedy's first plans.

    The plan often meets even the simple bound.
    """
    best: tuple[int, Plan] | None = None
    for plan, period_ns in islice(greedy_plans_with_periods(problem, machine, budget_bytes, bound_ns), FIRST):
        if best is None or period_ns < best[0]:
            best = period_ns, plan
        if period_ns <= bound_ns * CLOSE:
            break
    assert best is not None, "the portfolio yields a plan or raises"
    return best


def plan_by_planners_in_turn(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Return the fastest plan that greedy, search and ilp find one after another."""
    begun, close_ns = monotonic(), int(bound_ns * CLOSE)
    portfolio_ends = begun + search.START_SHARE * time_limit_s
    starts = search.best_greedy_plans_with_periods(problem, machine, budget_bytes, bound_ns, portfolio_ends)
    if starts[0][0] > bound_ns and (len(problem.gaps) <= FEW or starts[0][0] > bound_ns * FAR):
        starts = sorted(
            [*starts, *_published_plans(problem, machine, budget_bytes, time_limit_s)],
            key=_step_ns_of_starting_plan,
        )
    best_ns, best = starts[0]
    if best_ns <= bound_ns:
        return best
    stop = begun + time_limit_s
    if best_ns > close_ns and monotonic() < stop:
        best = search.best_plan_from_starts(
            problem,
            machine,
            [plan for _, plan in starts],
            bound_ns=close_ns,
            seed=seed,
            time_limit_s=stop - monotonic(),
            rounds=search.round_limit(problem),
        )
    return ilp.improve_plan_by_windows(problem, machine, best, bound_ns=close_ns, seed=seed, stop=stop)
