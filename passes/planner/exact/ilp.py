"""The exact planner. In: a problem and a budget. Out: greedy's plan, improved window by window.

A *gap* is an idle interval of a tensor, and a *window* is a range of ticks (kernels). A step with few gaps is
one window. Its solution is optimal if every tick is a choice (MOST_TICKS). For a larger step, the planner
simulates the plan, and makes windows around the longest waits (`windows`). Gaps with an eviction or a fetch
in a window may change. A solver finds the best ticks and routes for these gaps (`integer_program`).

The planner accepts a solution if plan_check accepts the new plan, and if the simulated step is shorter. Each
window is tried once. It is tried again only after an accepted solution has changed ticks of this window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile

from ..greedy.choose import GapChoice
from ..greedy.greedy import greedy, plan_of_absences
from ..greedy.timing import Absence
from ..problem.problem import Problem, Route, transfer_ns
from ..problem.progress_lines import show_best_step
from ..simulate.simulate import tick_entries_and_period
from .integer_program import solve_window
from .windows import GapSolution, MovableGap, SimulatedPlan, Window

FEW_GAPS = 6  # a step with at most this number of gaps has one window: the whole step
# Limit for the number of ticks to choose from in a window of the whole step, summed over its gaps. Above this
# limit, only every n-th tick is a choice.
MOST_TICKS = 400
GREEDY_SHARE = 0.5  # share of the time limit for greedy


def ilp(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Make a plan by greedy, and improve it window by window. Stop when the time is up, or when all windows
    were tried.
    """
    stop = monotonic() + time_limit_s
    share = GREEDY_SHARE * time_limit_s
    start = greedy(problem, machine, budget_bytes, bound_ns=bound_ns, seed=seed, time_limit_s=share)
    return improve_plan_by_windows(problem, machine, start, bound_ns=bound_ns, seed=seed, stop=stop)


def improve_plan_by_windows(
    problem: Problem, machine: Machine, plan: Plan, *, bound_ns: int, seed: int, stop: float
) -> Plan:
    """Try to make the plan faster. Return the plan, or a faster one."""
    best, best_ns = plan, tick_entries_and_period(plan, problem.profile, machine)[1]
    if sum(not gap.unused for gap in problem.gaps) <= FEW_GAPS:
        if best_ns > bound_ns and monotonic() < stop:
            chosen = solve_window(
                problem, _whole_step_window(problem, best, best_ns), stop - monotonic(), seed
            )
            best, _ = _plan_with_solutions_if_faster(
                problem, machine, best, best_ns, (), chosen, all_unused=True
            )
        return best
    tried: set[tuple[int, int]] = set()
    state = SimulatedPlan.from_plan(problem, machine, best)
    while best_ns > bound_ns and monotonic() < stop:
        spot = next((spot for spot in state.ranges_around_stalls() if spot not in tried), None)
        if spot is None:
            break
        tried.add(spot)
        show_best_step("ilp", best_ns)
        window = state.build_window(*spot)
        if window is None:
            continue
        chosen = solve_window(problem, window, stop - monotonic(), seed)
        kept = [a for a in state.absences if a.gap not in {free.index for free in window.free}]
        improved, improved_ns = _plan_with_solutions_if_faster(problem, machine, best, best_ns, kept, chosen)
        if improved_ns < best_ns:
            best, best_ns, state = improved, improved_ns, SimulatedPlan.from_plan(problem, machine, improved)
            tried = {other for other in tried if other[1] <= spot[0] or spot[1] <= other[0]}
    return best


def _plan_with_solutions_if_faster(
    problem: Problem,
    machine: Machine,
    best: Plan,
    best_ns: int,
    kept: Sequence[Absence],
    chosen: Sequence[GapSolution] | None,
    all_unused: bool = False,
) -> tuple[Plan, int]:
    """Make a plan from the gaps in `kept` and the solutions in `chosen`. Return it if it is faster than
    `best` and plan_check accepts it. Otherwise return `best`.
    """
    if chosen is None:
        return best, best_ns
    homes = {home.tensor for home in best.homes}
    absences = list(kept)
    for each in chosen:
        if each.route is not None:
            read_ns = transfer_ns(each.route.back, problem.gaps[each.index].size_bytes)
            absences.append(Absence(each.index, each.route, 0, read_ns, each.free, each.trigger))
    absences.sort(key=lambda absence: _age_sort_key(problem, absence.gap))
    routes = {problem.gaps[absence.gap].tensor: absence.route for absence in absences}
    unused = [
        index
        for index, gap in enumerate(problem.gaps)
        if gap.unused and (all_unused or problem.profile.tensors[gap.tensor].name in homes)
    ]
    routes |= {problem.gaps[index].tensor: _route_of_unused_tensor(problem, best, index) for index in unused}
    choice = GapChoice(best.budget_bytes, (*unused, *(absence.gap for absence in absences)), routes)
    plan = replace(plan_of_absences(problem, choice, absences, best.budget_bytes), planner="ilp")
    took_ns = tick_entries_and_period(plan, problem.profile, machine)[1]
    if took_ns >= best_ns or not check_plan_against_profile(plan, problem.profile, machine).feasible:
        return best, best_ns
    return plan, took_ns


def _age_sort_key(problem: Problem, index: int) -> tuple[int, int]:
    """Return a sort key that orders gaps of the same bytes by the ticks since the write of these bytes."""
    return problem.gaps[index].ticks_since_write(len(problem.live)), index


def _route_of_unused_tensor(problem: Problem, plan: Plan, index: int) -> Route:
    """Return the route to the home (the tier between steps) of a tensor that no kernel uses.

    If the plan gives the tensor no home, return the fastest route.
    """
    name = problem.profile.tensors[problem.gaps[index].tensor].name
    tier = next((home.tier for home in plan.homes if home.tensor == name), problem.routes[0].tier)
    return next(route for route in problem.routes if route.tier == tier)


def _whole_step_window(problem: Problem, plan: Plan, below_ns: int) -> Window:
    """Return the window of the whole step, with all gaps. If the gaps have too many ticks, only every n-th
    tick is a choice.
    """
    ages = sorted(range(len(problem.gaps)), key=lambda index: _age_sort_key(problem, index))
    used = [(index, problem.gaps[index]) for index in ages if not problem.gaps[index].unused]
    thin = max(1, -(-sum(gap.end - gap.start for _, gap in used) // MOST_TICKS))
    free = [
        MovableGap(
            index,
            tuple(sorted({*range(gap.start + 1, gap.end, thin)})),
            tuple(sorted({*range(gap.end, gap.start + 1, -thin)})),
            problem.routes,
        )
        for index, gap in used
    ]
    unused = [(index, gap.size_bytes) for index, gap in enumerate(problem.gaps) if gap.unused]
    need = tuple(int(row) - sum(size for _, size in unused) - plan.budget_bytes for row in problem.live)
    room = {route: route.capacity_bytes for route in problem.routes}
    for index, size in unused:
        room[_route_of_unused_tensor(problem, plan, index)] -= size
    return Window(True, 0, len(problem.live), tuple(free), need, below_ns, room_bytes=room)
