"""How fast can a step be at best? In: problem, machine, budget. Out: a lower bound, and where it waits.

The bound holds for every plan that keeps the budget, *for this profile*: this order of kernels, these times,
these links, inputs and kept tensors where they are. If it is told what may be made again (`again`), it holds
for plans that do so, too; else for plans without recompute. It is the larger of a simple one and the optimum
of a linear relaxation (`relaxation`), recomputed in integers (`certificate`).

The relaxation looks at memory and at time at a few check kernels only. Whichever they are, the bound is true;
more of them make it tighter, and the solver's time grows with the cube of their number. So the first are the
fullest kernels of equal parts of the step, and then they are added where the solution's prices say. A step
that waits nowhere by them has no prices: then the parts are halved, as it may wait in a small one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic

import numpy as np

from teraio.formats.machine import Machine

from ..problem.problem import Bytes, Problem
from ..problem.progress_lines import show_bound_search
from .certificate import Solution, certified_stall_bound_ns, solve_relaxation
from .recompute_terms import RecomputeOption
from .relaxation import Relaxation, build_relaxation

# On four steps of Llama 8B (1,500 kernels, 40 and 80 GB, 4 and 8 SSDs) 16 checks and 4 more a round ended
# after 4 to 8 rounds and 2 to 4 s at a bound 0 to 1.2 % above that of 96 checks in equal parts (10 to 19 s).
FIRST_CHECKS = 16
MORE_CHECKS = 4
CALM_CHECKS = 32  # that see no wait are enough
WORTH = 1e-3  # of the step: the least time by which the prices of an interval must differ to cut it
GAP_S = 40e-6  # the time a gap costs before the solver starts


@dataclass(frozen=True, slots=True)
class Bound:
    """`step_ns` is proven. The rest are hints, empty without a relaxation: `stalls_ns`, by tick, is where it
    waits, `away` the part of each gap's bytes that it has away at most, `towards`, by tensor, the place of
    its route in `problem.routes` (-1: it is never away)."""

    step_ns: int
    simple_ns: int
    checks: tuple[int, ...] = ()
    stalls_ns: tuple[int, ...] = ()
    away: tuple[float, ...] = ()
    towards: tuple[int, ...] = ()
    again: tuple[tuple[int, float], ...] = ()  # tensor, and which fraction of it is made again


def simple_bound_ns(problem: Problem, budget_bytes: int) -> int:
    """A true bound on the step time of any plan that keeps this budget, simple and not tight.

    Compute: kernels run one after another. Bytes: at every tick, what lives beyond the budget is away; all of
    it is used again (unused tensors are left out), so it is fetched once per step or more, over all links.
    """
    forced_bytes = _bytes_beyond_budget(problem, budget_bytes)
    rate = sum(route.back.bandwidth_bytes_per_s for route in problem.routes)
    fetch_ns = -(-forced_bytes * 1_000_000_000 // rate) if forced_bytes > 0 and rate else 0
    return max(_compute_ns(problem), fetch_ns)


def lower_bound(
    problem: Problem,
    machine: Machine,
    budget_bytes: int,
    *,
    time_limit_s: float,
    again: Sequence[RecomputeOption] = (),
    refined: bool = True,
) -> Bound:
    """The best bound that the time allows, and never less than the simple one. `again`: it holds also for
    plans that make any of these again. Not `refined`: that of the first checks, within a percent of it."""
    stop = monotonic() + time_limit_s
    simple = _compute_ns(problem) if again else simple_bound_ns(problem, budget_bytes)
    best = Bound(simple, simple)
    if _bytes_beyond_budget(problem, budget_bytes) <= 0 or not problem.routes:
        return best
    checks, took_s = pick_check_ticks(problem, FIRST_CHECKS), len(problem.gaps) * GAP_S
    while monotonic() + took_s < stop:
        began = monotonic()
        show_bound_search(len(checks))
        relaxation = build_relaxation(problem, dict(machine.shared), budget_bytes, checks, again)
        solution = solve_relaxation(relaxation.rows, stop - monotonic())
        if solution is None:
            break
        step_ns = _compute_ns(problem) + certified_stall_bound_ns(relaxation.rows, solution.prices)
        if step_ns > best.step_ns or not best.checks:
            stalls = _spread_stalls_by_tick(problem, checks, solution.values[: len(checks)])
            away = _evicted_part_by_gap(problem, relaxation, solution.values)
            made = tuple((tensor, solution.values[column]) for tensor, column in relaxation.again.items())
            towards = _assign_route_per_tensor(problem, relaxation, solution.values)
            best = Bound(max(step_ns, best.step_ns), simple, tuple(checks), stalls, away, towards, made)
        more = _split_intervals_where_prices_change(problem, relaxation, solution)
        if len(more) == len(checks) and step_ns == _compute_ns(problem) and len(checks) < CALM_CHECKS:
            more = pick_check_ticks(problem, 2 * len(checks))
        if len(more) <= len(checks) or not refined:
            break
        took_s = (monotonic() - began) * (len(more) / len(checks)) ** 3
        checks = more
    return best


def _compute_ns(problem: Problem) -> int:
    return problem.profile.compute_ns


def _bytes_beyond_budget(problem: Problem, budget_bytes: int) -> int:
    """What must be away at the fullest tick, and is used again."""
    return int(problem.live.max()) - sum(g.size_bytes for g in problem.gaps if g.unused) - budget_bytes


def pick_check_ticks(problem: Problem, count: int) -> list[int]:
    """The fullest tick of each of so many parts of the step, which are equal in time and in bytes that begin
    or end a gap."""
    ticks = len(problem.live)
    if ticks <= count:
        return list(range(ticks))
    weight = _gap_edge_bytes(problem)
    weight /= max(weight.sum(), 1.0)
    weight += _kernel_durations_ns(problem) / max(_compute_ns(problem), 1) + 1e-9
    part = np.minimum((np.cumsum(weight) / weight.sum() * count).astype(np.int64), count - 1)
    checks = []
    for number in np.unique(part):
        inside = np.flatnonzero(part == number)
        checks.append(int(inside[problem.live[inside].argmax()]))
    return checks


def _kernel_durations_ns(problem: Problem) -> Bytes:
    return np.array([kernel.duration_ns for kernel in problem.profile.kernels], np.float64)


def _gap_edge_bytes(problem: Problem) -> Bytes:
    """By tick, the bytes whose gaps begin or end there: what transfers have to do with it."""
    edges = np.zeros(len(problem.live), np.float64)
    for gap in problem.gaps:
        if not gap.unused:
            edges[gap.start % len(edges)] += gap.size_bytes
            edges[gap.end % len(edges)] += gap.size_bytes
    return edges


def _spread_stalls_by_tick(
    problem: Problem, checks: Sequence[int], stalls_ns: Sequence[float]
) -> tuple[int, ...]:
    """Stalls by tick: those of an interval in proportion to the bytes of gaps that begin or end in it."""
    ticks, weight = len(problem.live), _gap_edge_bytes(problem) + 1.0
    spread = np.zeros(ticks, np.float64)
    for (first, end), stall_ns in zip(pairwise([*checks, checks[0] + ticks]), stalls_ns, strict=True):
        inside = np.arange(first + 1, end + 1) % ticks  # the wait is before the kernel at `end`
        spread[inside] += max(stall_ns, 0.0) * weight[inside] / weight[inside].sum()
    return tuple(int(stall) for stall in spread)


def _evicted_part_by_gap(
    problem: Problem, relaxation: Relaxation, values: Sequence[float]
) -> tuple[float, ...]:
    """For each gap the largest fraction that is away at a check in it."""
    away = [0.0] * len(problem.gaps)
    for each in relaxation.away:
        most = max(sum(values[column] for column in check) for check in zip(*each.columns, strict=True))
        for gaps in each.group.members:
            away[gaps[each.gap]] = most
    return tuple(away)


def _assign_route_per_tensor(
    problem: Problem, relaxation: Relaxation, values: Sequence[float]
) -> tuple[int, ...]:
    """A route for each tensor, so that of those that are alike the routes get the parts that they have in the
    relaxation, one after another in the order of the step."""
    routes = range(len(problem.routes))
    parts: dict[int, list[float]] = defaultdict(lambda: [0.0 for _ in routes])
    alike: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(relaxation.away):
        most = [max(values[column] for column in columns) for columns in each.columns]
        for gaps in each.group.members:
            tensor = problem.gaps[gaps[each.gap]].tensor
            alike[tensor].append(number)
            parts[tensor] = [part + more for part, more in zip(parts[tensor], most, strict=True)]
    towards = [-1] * len(problem.profile.tensors)
    owed: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0 for _ in routes])
    for gap in problem.gaps:
        if sum(parts.get(gap.tensor, ())) > 0 and towards[gap.tensor] < 0:
            part, due = parts[gap.tensor], owed[tuple(alike[gap.tensor])]
            for route in routes:
                due[route] += gap.size_bytes * part[route] / sum(part)
            towards[gap.tensor] = max(routes, key=lambda route: due[route])
            due[towards[gap.tensor]] -= gap.size_bytes
    return tuple(towards)


def _split_intervals_where_prices_change(
    problem: Problem, relaxation: Relaxation, solution: Solution
) -> list[int]:
    """The checks, and the middles of those intervals at whose ends the price of a lane changes the most.

    Where prices are alike, a transfer may as well run in the next interval, and a check between them changes
    little. Where they change, the relaxation profits from transfers that run in the cheap part of an interval
    that has none: before the bytes exist, or after they are needed.
    """
    checks, lanes = relaxation.checks, {lane for lane, _, _ in relaxation.timed}
    prices = {lane: [0.0] * len(checks) for lane in lanes}
    for lane, interval, row in relaxation.timed:
        prices[lane][interval] = solution.prices[row]
    ticks, durations, edges = len(problem.live), _kernel_durations_ns(problem), _gap_edge_bytes(problem) + 1.0
    best: list[tuple[float, int]] = []
    for interval, (first, end) in enumerate(pairwise([*checks, checks[0] + ticks])):
        inside = np.arange(first + 1, end) % ticks
        if len(inside) == 0:
            continue
        stall_ns = max(solution.values[interval], 0.0)
        change = sum(
            abs(by_interval[interval] - by_interval[neighbour % len(checks)])
            for neighbour in (interval - 1, interval + 1)
            for by_interval in prices.values()
        )
        weight = durations[inside] + stall_ns * edges[inside] / edges[inside].sum() + 1.0
        middle = int(inside[np.searchsorted(np.cumsum(weight), weight.sum() / 2)])
        best.append((change * float(weight.sum()), middle))
    least_ns = WORTH * (_compute_ns(problem) + sum(solution.values[: len(checks)]))
    best = sorted(entry for entry in best if entry[0] > least_ns)
    return sorted({*checks, *(middle for _, middle in best[-MORE_CHECKS:])})
