"""The choice of tiers and gaps for slow tiers that are nearly full.

In: a problem and a budget. Out: a choice, or a PlanError with the reason why no choice exists.

A *gap* is an idle interval of a tensor. `choose` takes gap after gap, so it may fill a tier with tensors that
fit better into another tier. In this module a solver chooses all tiers and all gaps together. It minimizes
the bytes that move, and ignores time. If the solver proves that no choice exists, no plan exists either.
"""

from __future__ import annotations

from typing import Any

from teraio.errors import PlanError
from teraio.formats.profile import is_within_life

from ..problem import solvers
from ..problem.problem import Problem
from .choose import GapChoice, no_tier_room_error

PACKING_S = 5.0  # time limit of the solver; for hundreds of tensors it needs milliseconds


def pack_gaps_into_tiers(problem: Problem, budget_bytes: int) -> GapChoice:
    """Return the choice of gaps and tiers whose evictions move the fewest bytes.

    Raise PlanError if no choice exists, if no choice was found in time, or if OR-Tools is missing.
    """
    gaps, routes = problem.gaps, problem.routes
    if not routes:
        raise no_tier_room_error(problem, budget_bytes)
    if not solvers.is_ortools_installed():
        raise PlanError(
            f"{no_tier_room_error(problem, budget_bytes)} (install ortools: its solver may find a way)"
        )
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    places: dict[int, list[Any]] = {}
    for gap in gaps:
        if gap.tensor not in places:
            places[gap.tensor] = [model.new_bool_var("") for _ in routes]
            model.add_at_most_one(places[gap.tensor])
    evicted = [model.new_bool_var("") for _ in gaps]
    for gap, bit in zip(gaps, evicted, strict=True):
        model.add_bool_or(*places[gap.tensor], bit.negated())
    _add_memory_limit(problem, budget_bytes, model, evicted)
    _add_tier_limits(problem, model, places)
    model.minimize(sum(gap.size_bytes * bit for gap, bit in zip(gaps, evicted, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = PACKING_S
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        raise no_tier_room_error(problem, budget_bytes)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise PlanError(
            f"{no_tier_room_error(problem, budget_bytes)} (not proven: the solver had {PACKING_S:g} s)"
        )
    taken = tuple(index for index, bit in enumerate(evicted) if solver.boolean_value(bit))
    on = {
        gaps[index].tensor: next(
            route
            for route, bit in zip(routes, places[gaps[index].tensor], strict=True)
            if solver.boolean_value(bit)
        )
        for index in taken
    }
    return GapChoice(budget_bytes, taken, on)


def _add_memory_limit(problem: Problem, budget_bytes: int, model: Any, evicted: list[Any]) -> None:
    """Require at each tick that enough bytes are evicted: the other live bytes must fit into the budget."""
    ticks = len(problem.live)
    inside: list[list[Any]] = [[] for _ in range(ticks)]
    for gap, bit in zip(problem.gaps, evicted, strict=True):
        for tick in range(gap.start + 1, gap.end):
            inside[tick % ticks].append(gap.size_bytes * bit)
    for tick, terms in enumerate(inside):
        if problem.live[tick] > budget_bytes:
            model.add(sum(terms) >= int(problem.live[tick]) - budget_bytes)


def _add_tier_limits(problem: Problem, model: Any, places: dict[int, list[Any]]) -> None:
    """Require that each tier has room for its tensors, from their first use to their last use."""
    sizes, ticks = {gap.tensor: gap.size_bytes for gap in problem.gaps}, len(problem.live)
    lives = {tensor: problem.profile.tensors[tensor].life(ticks) for tensor in places}
    for number, route in enumerate(problem.routes):
        if sum(sizes.values()) <= route.capacity_bytes:
            continue
        for tick in sorted({first for first, _ in lives.values()}):
            alive = [tensor for tensor, life in lives.items() if is_within_life(life, tick, ticks)]
            model.add(sum(sizes[t] * places[t][number] for t in alive) <= route.capacity_bytes)
