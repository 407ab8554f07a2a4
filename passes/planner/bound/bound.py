"""A lower bound on the time of a step.

In: a problem, a machine, a budget. Out: the bound, and the stalls of the relaxation.

The bound holds for every plan that keeps the budget, but only for this profile and this machine. The profile
fixes the order and the times of the kernels, and the machine fixes the links. Inputs and kept tensors are
resident. Plans that recompute tensors are included only if the caller passes these tensors (`again`). The
bound is the larger of two numbers: a simple bound, and the optimum of a linear relaxation (`relaxation`),
recomputed in integers (`certificate`).

The relaxation constrains memory and time only at a few check kernels. The bound holds for any choice of check
kernels. More check kernels make the bound tighter, but the solver's time grows with the cube of their number.
The first check kernels are therefore the fullest kernels of equal parts of the step. Further check kernels
are added where the solution's prices change. A relaxation without stalls has no prices. In this case the
number of parts is doubled, because a short part of the step may still stall.
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

# The numbers of checks were measured on four steps of Llama 8B with 1,500 kernels. The machines had 40 or 80
# GB and 4 or 8 SSDs. The bound search began with 16 checks, and added 4 checks in each round. It ended after
# 4 to 8 rounds, which took 2 to 4 s. For comparison, 96 checks were laid in equal parts of the step. The
# solver then took 10 to 19 s, and the bound was lower by 0 to 1.2 %.
FIRST_CHECKS = 16
MORE_CHECKS = 4
CALM_CHECKS = 32  # with this number of checks and no stall, the search for a better bound ends
WORTH = 1e-3  # split an interval if its price change times its length is above this share of the step
GAP_S = 40e-6  # estimated time per gap before the solver starts


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven bound on the step, and hints for planners. The hints are empty without a relaxation.

    step_ns          the bound
    simple_ns        the simple bound
    checks           ticks of the check kernels
    stalls_ns        by tick: the stall in the optimum of the relaxation
    evicted_parts    by gap: the largest fraction of its bytes that is evicted at a check kernel
    towards          by tensor: the index of its route in `problem.routes`, or -1 if it is never evicted
    again            (tensor, fraction that is recomputed) for each tensor that can be recomputed
    """

    step_ns: int
    simple_ns: int
    checks: tuple[int, ...] = ()
    stalls_ns: tuple[int, ...] = ()
    evicted_parts: tuple[float, ...] = ()
    towards: tuple[int, ...] = ()
    again: tuple[tuple[int, float], ...] = ()


def simple_bound_ns(problem: Problem, budget_bytes: int) -> int:
    """Return a simple bound on the step time of any plan that keeps this budget. It is valid but not tight.

    The bound is the larger of two times: (1) the time of all kernels, and (2) the time of fetching the live
    bytes beyond the budget at the fullest tick. All links together fetch these bytes. Each of these bytes is
    fetched at least once per step, because it is used again. Unused tensors are not counted.
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
    """Return the best bound found in the time. The result is at least the simple bound.

    With `again`, the bound also holds for plans that recompute any of these tensors. With refined=False, the
    result is the bound with only the first checks. This bound is within a percent of the refined bound.
    """
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
            parts = _evicted_part_by_gap(problem, relaxation, solution.values)
            made = tuple((tensor, solution.values[column]) for tensor, column in relaxation.again.items())
            towards = _assign_route_per_tensor(problem, relaxation, solution.values)
            best = Bound(max(step_ns, best.step_ns), simple, tuple(checks), stalls, parts, towards, made)
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
    """Return the number of bytes that are used again and must be evicted at the fullest tick."""
    return int(problem.live.max()) - sum(g.size_bytes for g in problem.gaps if g.unused) - budget_bytes


def pick_check_ticks(problem: Problem, count: int) -> list[int]:
    """Return the fullest tick of each part of the step.

    The `count` parts are equal in the sum of two weights: time, and the bytes of gaps that begin or end in
    the part.
    """
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
    """Return, by tick, the bytes of gaps that begin or end at the tick.

    Transfers near the tick move these bytes.
    """
    edges = np.zeros(len(problem.live), np.float64)
    for gap in problem.gaps:
        if not gap.unused:
            edges[gap.start % len(edges)] += gap.size_bytes
            edges[gap.end % len(edges)] += gap.size_bytes
    return edges


def _spread_stalls_by_tick(
    problem: Problem, checks: Sequence[int], stalls_ns: Sequence[float]
) -> tuple[int, ...]:
    """Return stalls by tick.

    The stall of an interval is spread over the interval's ticks. The part of a tick is in proportion to the
    bytes of the gaps that begin or end at the tick.
    """
    ticks, weight = len(problem.live), _gap_edge_bytes(problem) + 1.0
    spread = np.zeros(ticks, np.float64)
    for (first, end), stall_ns in zip(pairwise([*checks, checks[0] + ticks]), stalls_ns, strict=True):
        inside = np.arange(first + 1, end + 1) % ticks  # includes `end`, because the kernel at `end` waits
        spread[inside] += max(stall_ns, 0.0) * weight[inside] / weight[inside].sum()
    return tuple(int(stall) for stall in spread)


def _evicted_part_by_gap(
    problem: Problem, relaxation: Relaxation, values: Sequence[float]
) -> tuple[float, ...]:
    """Return for each gap the largest fraction that is evicted at a check kernel in the gap."""
    evicted_parts = [0.0] * len(problem.gaps)
    for each in relaxation.evicted:
        most = max(sum(values[column] for column in check) for check in zip(*each.columns, strict=True))
        for gaps in each.group.members:
            evicted_parts[gaps[each.gap]] = most
    return tuple(evicted_parts)


def _assign_route_per_tensor(
    problem: Problem, relaxation: Relaxation, values: Sequence[float]
) -> tuple[int, ...]:
    """Return the index of a route for each tensor, or -1 if the tensor is never evicted.

    The relaxation splits the bytes of a group of equal tensors among the routes. This function takes the
    tensors of a group in the order of the step, and gives each tensor one route. The shares of the routes in
    the group remain about the same.
    """
    routes = range(len(problem.routes))
    parts: dict[int, list[float]] = defaultdict(lambda: [0.0 for _ in routes])
    alike: dict[int, list[int]] = defaultdict(list)
    for number, each in enumerate(relaxation.evicted):
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
    """Return the old checks, and a new check in each interval at which a lane's price changes most.

    A new check lies in the middle of its interval. If two neighbouring intervals have the same price, a
    transfer can run in either interval, so a new check changes little. If the prices differ, the relaxation
    runs transfers at times in the cheap interval at which no plan can run them. At these times the bytes do
    not exist yet, or were needed before. A check inside the cheap interval excludes part of these times.
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
