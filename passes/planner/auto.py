"""The planner `auto`. In: a problem and a budget. Out: the best plan of several planners.

    greedy    makes several plans, with hints from the relaxation that gives the bound. Planners of published
              systems add plans in two cases: (1) no plan meets the bound, and tensors have few idle
              intervals; (2) the best plan is far from the bound
    search    improves the best of these plans
    ilp       solves parts of the plan around the remaining waits by integer programs, in the time that
              `search` leaves

Each planner starts from the best plan so far, so the plan never gets worse. `auto` stops as soon as a plan
meets the bound, which is a lower bound on the step time. On small steps `search` reaches its limit of rounds
long before the time limit.
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

CLOSE = 1.001  # planning stops if the step time of a plan is at most this factor times the bound
FIRST = 4  # number of plans by greedy in `quick_greedy_plan`
WINDOWS_SHARE = 0.15  # largest share of the time limit for ilp, of the time that `search` leaves

# The planners of published systems also run in two cases. (1) Tensors have few idle intervals (gaps). These
# planners then take nearly no time. (2) Greedy's plan is far from the bound.
OTHERS = (zero_infinity, tencache, g10, teraio_paper)
FEW = 400  # gaps are few if their number is at most this
FAR = 1.1  # a plan is far from the bound if its step time is above this factor times the bound
OTHERS_SHARE = 0.05  # share of the time limit for each planner in OTHERS
_Start = tuple[int, Plan]


def _published_plans(
    problem: Problem, machine: Machine, budget_bytes: int, time_limit_s: float
) -> Iterator[_Start]:
    """Yield (step time, plan) for each planner of a published system that finds a plan."""
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

    This plan often meets even the simple bound, a lower bound that needs no solver.
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
    """Run greedy, search and ilp one after another, and return the fastest plan."""
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
    left_s = stop - monotonic()
    if best_ns > close_ns and left_s > 0:
        best = search.best_plan_from_starts(
            problem,
            machine,
            [plan for _, plan in starts],
            bound_ns=close_ns,
            seed=seed,
            time_limit_s=left_s,
            rounds=search.round_limit(problem),
        )
    stop = min(monotonic() + WINDOWS_SHARE * time_limit_s, stop)
    return ilp.improve_plan_by_windows(problem, machine, best, bound_ns=close_ns, seed=seed, stop=stop)
