"""A lower bound on the time of a step.

In: a problem, a machine, a budget. Out: the bound, and the stalls (waits for transfers) of the relaxation.

The bound holds for every plan within the budget, but only for this profile and this machine. The profile
gives the order and the times of the kernels, and the machine gives the links. Inputs and tensors of the
option `keep` are always resident. The bound holds for plans that recompute tensors only if the caller passes
these tensors (`again`). The bound is the larger of two numbers. The first number is a simple bound, which
needs no solver. The second number is the optimum of a linear program (`relaxation`), computed again in
integers (`certificate`).

The relaxation limits memory and time only at a few kernels, the *check kernels*. The bound holds for any
choice of check kernels. More check kernels make the bound tighter, but the solver's time grows with the cube
of their number. So the step is first divided into equal parts. The kernel with the most live bytes in each
part is a check kernel. Each further round adds check kernels where the prices (dual values) of the solution
change. If the solution has no stalls, it has no prices. In this case the number of parts is doubled, because
a short part of the step may still stall.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from time import monotonic

import numpy as np

from teraio.formats.machine import Machine

from ..problem.problem import Bytes, Problem
from ..problem.progress_lines import show_bound_search
from .certificate import Solution, certified_stall_bound_ns, solve_relaxation
from .recompute_terms import RecomputeOption
from .relaxation import Relaxation, build_relaxation

# Numbers of check kernels. They were measured on four steps of Llama 8B with 1,500 kernels. The machines had
# 40 or 80 GB and 4 or 8 SSDs. The bound search began with 16 checks, and added 4 checks in each round. It
# ended after 4 to 8 rounds, which took 2 to 4 s. The alternative was 96 checks at once, one for each of 96
# equal parts of the step. The solver then took 10 to 19 s, and the bound was lower by 0 to 1.2 %.
FIRST_CHECKS = 16
MORE_CHECKS = 4
CALM_CHECKS = 32  # if a solution with this number of checks has no stall, the search ends
WORTH = 1e-3  # split an interval if (change of price x length) is above this share of the step time
GAP_S = 40e-6  # estimated time of the first round, per gap


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven lower bound on the step time, and hints for planners. If no relaxation was solved, there are
    no hints.

    step_ns          the bound
    simple_ns        the bound of `simple_bound_ns`
    checks           indices (ticks) of the check kernels
    stalls_ns        by tick: the wait before the kernel in the relaxation's optimum
    evicted_parts    by gap: the largest fraction of the tensor's bytes that is evicted at a check kernel
    towards          by tensor: the index of the tensor's route in `problem.routes`; -1: it is never evicted
    again            (tensor, fraction that is recomputed) for each tensor that can be recomputed
    """

    step_ns: int
    simple_ns: int
    checks: tuple[int, ...] = ()
    stalls_ns: tuple[int, ...] = ()
    evicted_parts: tuple[float, ...] = ()
    towards: tuple[int, ...] = ()
    again: tuple[tuple[int, float], ...] = ()

    def add_hints(self, problem: Problem) -> Problem:
        """Return the problem, for which this bound was computed, with the hints for planners."""
        return replace(
            problem, stalls_ns=self.stalls_ns, evicted_parts=self.evicted_parts, towards=self.towards
        )


def simple_bound_ns(problem: Problem, budget_bytes: int) -> int:
    """Return a simple lower bound on the step time of any plan within this budget. It is valid, but often far
    too low.

    The bound is the larger of two times: (1) the time of all kernels, and (2) the time of a fetch over all
    links together. The fetch has the live bytes beyond the budget, at the kernel with the most live bytes.
    Each of these bytes is used again, so it must be fetched in each step. Tensors that no kernel uses do not
    count.
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
    """Return the highest bound that was found in the time. It is at least the simple bound.

    `again` has tensors: the bound also holds for plans that recompute any of them. If `refined` is False, use
    only the first check kernels. The bound is then lower, by 1 % for most steps, and by 5 % at most so far.
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
        more = split_intervals_where_prices_change(problem, relaxation, solution)
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
    """Return the live bytes beyond the budget at the kernel with the most live bytes. Tensors that no kernel
    uses do not count.
    """
    return int(problem.live.max()) - sum(g.size_bytes for g in problem.gaps if g.unused) - budget_bytes


def pick_check_ticks(problem: Problem, count: int) -> list[int]:
    """Divide the step into `count` parts. Return, for each part, the tick with the most live bytes.

    The weight of a part is its share of the step's time, plus its share of the bytes whose gaps begin or end
    in the part. All parts have the same weight.
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

    A gap is an idle interval of a tensor. The more bytes, the more transfers are likely near the tick.
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
    """Return the stall of each tick.

    The relaxation checks memory and time at some kernels only, the *check kernels*. So it has one stall for
    all ticks between two check kernels. Divide this stall among these ticks. The share of a tick is in
    proportion to the bytes of tensors whose idle interval (gap) begins or ends at the tick.
    """
    ticks, weight = len(problem.live), _gap_edge_bytes(problem) + 1.0
    spread = np.zeros(ticks, np.float64)
    for (first, end), stall_ns in zip(pairwise([*checks, checks[0] + ticks]), stalls_ns, strict=True):
        inside = np.arange(first + 1, end + 1) % ticks  # with `end`, whose kernel may wait
        spread[inside] += max(stall_ns, 0.0) * weight[inside] / weight[inside].sum()
    return tuple(int(stall) for stall in spread)


def _evicted_part_by_gap(
    problem: Problem, relaxation: Relaxation, values: Sequence[float]
) -> tuple[float, ...]:
    """Return, for each gap, the largest fraction of its bytes that the relaxation evicts at a check kernel in
    the gap.
    """
    evicted_parts = [0.0] * len(problem.gaps)
    for each in relaxation.evicted:
        most = max(sum(values[column] for column in check) for check in zip(*each.columns, strict=True))
        for gaps in each.group.members:
            evicted_parts[gaps[each.gap]] = most
    return tuple(evicted_parts)


def _assign_route_per_tensor(
    problem: Problem, relaxation: Relaxation, values: Sequence[float]
) -> tuple[int, ...]:
    """Return the index of a route (a slow tier with its links) for each tensor, or -1 if the tensor is never
    evicted.

    The relaxation divides the bytes of a group of equal tensors among the routes. This function gives each
    tensor one route, in the order of the step. Each route gets about the share of the group's bytes that it
    has in the relaxation.
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


def split_intervals_where_prices_change(
    problem: Problem, relaxation: Relaxation, solution: Solution
) -> list[int]:
    """Return the old checks, and new checks in the intervals where the price of a link's time changes most.

    A new check is in the middle of its interval. If two neighbouring intervals have the same price, a
    transfer can run in each of them, so a new check changes little. If the prices differ, the relaxation puts
    transfers into the cheap interval. It may put them at times at which no plan can run them, because the
    bytes do not exist yet or are needed earlier. A check inside the cheap interval excludes some of these
    times.
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
