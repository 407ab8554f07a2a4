"""What `auto` does. In: a problem and a budget. Out: the best plan that the planners make together, in turn.

    greedy    a portfolio of plans, guided by the relaxation; where it is far from the bound, those of others
    search    goes on from the best of them
    ilp       solves windows that still wait exactly

Each hands on the best plan so far, so none makes it worse. A plan that meets the bound ends it at once; small
steps end by rounds, long before the time is up.
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

CLOSE = 1.001  # of the bound: not worth more time
FIRST = 4
WINDOWS_SHARE = (
    0.15  # four steps of Llama 8B came 0 to 0.5 % closer to the bound in 2.5 of 10 s, after greedy
)

# Published systems are asked, too, where that takes no time, or where greedy is so far above the bound.
OTHERS = (zero_infinity, tencache, g10, teraio_paper)
FEW = 400  # gaps
FAR = 1.1
OTHERS_SHARE = 0.05  # of the time, for each
_Start = tuple[int, Plan]


def _published_plans(
    problem: Problem, machine: Machine, budget_bytes: int, time_limit_s: float
) -> Iterator[_Start]:
    """The plans of published systems, where they have one."""
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
    """The best of greedy's first plans, and its step: often it meets even the simple bound."""
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
    """The fastest plan found."""
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
    windows_s = WINDOWS_SHARE * time_limit_s
    left_s = begun + time_limit_s - monotonic() - windows_s
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
    stop = min(monotonic() + windows_s, begun + time_limit_s)
    return ilp.improve_plan_by_windows(problem, machine, best, bound_ns=close_ns, seed=seed, stop=stop)
