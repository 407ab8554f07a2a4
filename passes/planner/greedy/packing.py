"""What goes where, when slow tiers are nearly full. In: a problem and a budget. Out: a choice, or why not.

A choice that goes gap by gap may fill a tier with what had better gone elsewhere. Here all is decided at
once, by a solver: which tensors have a place in which tier, and which gaps are spent there. It looks at bytes
only, not at time, and moves as few as it can. If there is no choice, there is no plan.
"""

from __future__ import annotations

from typing import Any

from teraio.errors import PlanError

from ..problem import solvers
from ..problem.problem import Problem
from .choose import GapChoice, lifetime, no_tier_room_error

PACKING_S = 5.0  # for a solver that needs milliseconds where tensors are hundreds


def pack_gaps_into_tiers(problem: Problem, budget_bytes: int) -> GapChoice:
    """PlanError with the certificate if nothing fits, or if none was found in time."""
    gaps, routes = problem.gaps, problem.routes
    if not routes:
        raise no_tier_room_error(problem, budget_bytes)
    if not solvers.is_ortools_installed():
        raise PlanError(
            f"{no_tier_room_error(problem, budget_bytes)} (ortools, which is missing, might find a way)"
        )
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    places: dict[int, list[Any]] = {}
    for gap in gaps:
        if gap.tensor not in places:
            places[gap.tensor] = [model.new_bool_var("") for _ in routes]
            model.add_at_most_one(places[gap.tensor])
    away = [model.new_bool_var("") for _ in gaps]
    for gap, bit in zip(gaps, away, strict=True):
        model.add_bool_or(*places[gap.tensor], bit.negated())
    _add_memory_limit(problem, budget_bytes, model, away)
    _add_tier_limits(problem, model, places)
    model.minimize(sum(gap.size_bytes * bit for gap, bit in zip(gaps, away, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = PACKING_S
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise no_tier_room_error(problem, budget_bytes)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise PlanError(
            f"{no_tier_room_error(problem, budget_bytes)} (this was not proven: {PACKING_S:g} s did not do)"
        )
    taken = tuple(index for index, bit in enumerate(away) if solver.boolean_value(bit))
    on = {
        gaps[index].tensor: next(
            route
            for route, bit in zip(routes, places[gaps[index].tensor], strict=True)
            if solver.boolean_value(bit)
        )
        for index in taken
    }
    return GapChoice(budget_bytes, taken, on)


def _add_memory_limit(problem: Problem, budget_bytes: int, model: Any, away: list[Any]) -> None:
    """At each tick, what is above the budget is away."""
    ticks = len(problem.live)
    inside: list[list[Any]] = [[] for _ in range(ticks)]
    for gap, bit in zip(problem.gaps, away, strict=True):
        for tick in range(gap.start + 1, gap.end):
            inside[tick % ticks].append(gap.size_bytes * bit)
    for tick, terms in enumerate(inside):
        if problem.live[tick] > budget_bytes:
            model.add(sum(terms) >= int(problem.live[tick]) - budget_bytes)


def _add_tier_limits(problem: Problem, model: Any, places: dict[int, list[Any]]) -> None:
    """A tier has room for its tensors, while they live."""
    sizes = {gap.tensor: gap.size_bytes for gap in problem.gaps}
    lives = {tensor: lifetime(problem, tensor) for tensor in places}
    for number, route in enumerate(problem.routes):
        if sum(sizes.values()) <= route.capacity_bytes:
            continue
        for tick in sorted({first for first, _ in lives.values()}):
            there = [t for t, (first, end) in lives.items() if first <= tick < end]
            model.add(sum(sizes[t] * places[t][number] for t in there) <= route.capacity_bytes)
