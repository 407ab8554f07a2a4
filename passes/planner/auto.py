"""What `auto` does. In: a problem and a budget. Out: the best plan that the planners make together, in turn.

    greedy    a portfolio of plans, guided by the relaxation
    search    goes on from the best of them
    ilp       solves windows that still wait exactly

Each hands on the best plan so far, so none makes it worse. A plan that meets the bound ends it at once; small
steps end by rounds, long before the time is up.
"""

from __future__ import annotations

from itertools import islice
from time import monotonic

from teraio.machine import Machine
from teraio.plan import Plan

from . import ilp, search
from .greedy import portfolio
from .problem import Problem

CLOSE = 1.001  # of the bound: not worth more time
FIRST = 4
WINDOWS_SHARE = (
    0.15  # four steps of Llama 8B came 0 to 0.5 % closer to the bound in 2.5 of 10 s, after greedy
)


def at_once(problem: Problem, machine: Machine, budget_bytes: int, bound_ns: int) -> tuple[int, Plan]:
    """The best of greedy's first plans, and its step: often it meets even the simple bound."""
    best: tuple[int, Plan] | None = None
    for plan, period_ns in islice(portfolio(problem, machine, budget_bytes, bound_ns), FIRST):
        if best is None or period_ns < best[0]:
            best = period_ns, plan
        if period_ns <= bound_ns * CLOSE:
            break
    assert best is not None, "the portfolio yields a plan or raises"
    return best


def auto(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """The fastest plan found."""
    begun, close_ns = monotonic(), int(bound_ns * CLOSE)
    portfolio_ends = begun + search.START_SHARE * time_limit_s
    starts = search.greedy_starts(problem, machine, budget_bytes, bound_ns, portfolio_ends)
    best_ns, best = starts[0]
    if best_ns <= bound_ns:
        return best
    windows_s = WINDOWS_SHARE * time_limit_s
    left_s = begun + time_limit_s - monotonic() - windows_s
    if best_ns > close_ns and left_s > 0:
        best = search.improve(
            problem,
            machine,
            [plan for _, plan in starts],
            bound_ns=close_ns,
            seed=seed,
            time_limit_s=left_s,
            rounds=search.enough_rounds(problem),
        )
    stop = min(monotonic() + windows_s, begun + time_limit_s)
    return ilp.improve(problem, machine, best, bound_ns=close_ns, seed=seed, stop=stop)
