"""A lower bound for all placements of updates: each update may run at the end of the step, or late.

In: a profile, a machine, a budget. Out: a step time that no plan can beat, whatever updates are late.

The relaxation of one order of kernels (relaxation.py) is built twice, into the same rows: for the order of
the profile, and for the order with all updates late. The checks are kernels that are no updates, so both
orders have the same checks and intervals. Each tensor that an update uses has two sets of unknowns, and one
more unknown: the part of its bytes whose update is late.

    evicted fractions in the profile's order  <= 1 - late part
    evicted fractions in the late order       <= late part
    live bytes at a check                      = live bytes in the profile's order + late part x difference

A plan with any placement is a solution: the late part of a tensor is 1 if its update is late, and 0
otherwise. An update may run in one of two intervals, so the time of both includes the update. A tensor that
several updates use is left out: its bytes need no memory, and no link. If plans may recompute tensors, the
first builder has the unknowns of recompute_terms.py, too. A recomputed tensor belongs to no update, so its
rows are the same for both orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from teraio.formats.late_updates import (
    Update,
    find_updates,
    order_of_kernels,
    profile_with_late_updates,
    weights_of,
)
from teraio.formats.machine import Machine
from teraio.formats.profile import Profile

from ..problem.problem import Problem, build_problem
from .bound import lower_bound, pick_check_ticks
from .certificate import certified_stall_bound_ns, solve_relaxation
from .recompute_terms import RecomputeFractions, RecomputeOption, find_recompute_options
from .relaxation import (
    RelaxationBuilder,
    Version,
    VersionGroup,
    VersionKey,
    group_alike_versions,
    interval_lengths_ns,
    versions_by_checks,
)
from .rows import Rows

# Numbers of check kernels, by the order in which they are picked: the profile's order, and the order with all
# updates late. The bound is the largest of all rounds. For 8B and 70B the first round takes 0.2 s to 0.7 s,
# and finds all but 1 % of the bound. Checks of the late order alone found bounds lower by 3 % to 6 %.
CHECKS = ((12, 0), (10, 10), (16, 8), (24, 12))

Versions = Mapping[int, Sequence[tuple[VersionKey, tuple[int, ...]]]]  # by tensor: keys, and their gaps


@dataclass(frozen=True, slots=True)
class _Orders:
    """The two orders of kernels, with their problems and checks.

    late_order    the kernels of the late order, as ticks of the profile
    moved         the ticks of the updates in the profile
    movable       tensors that one update uses
    omitted       tensors that several updates use
    """

    step: Problem
    late: Problem
    step_checks: tuple[int, ...]
    late_checks: tuple[int, ...]
    late_order: tuple[int, ...]
    moved: frozenset[int]
    movable: frozenset[int]
    omitted: frozenset[int]


def lower_bound_of_placements_ns(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    keep: Collection[str],
    time_limit_s: float,
    recompute: bool = False,
) -> int:
    """Return a lower bound on the step time of all plans, with any late updates. It is at least the time of
    all kernels. If `recompute` is True, the plans may recompute any tensors.
    """
    stop, best_ns = monotonic() + time_limit_s, profile.compute_ns
    updates, problem = find_updates(profile), build_problem(profile, machine, keep)
    again = find_recompute_options(problem) if recompute else ()
    if not updates:
        return lower_bound(problem, machine, budget_bytes, time_limit_s=time_limit_s, again=again).step_ns
    late = profile_with_late_updates(profile, weights_of(updates))
    problems = [problem, build_problem(late, machine, keep)]
    took_s, before = 0.0, 1
    for counts in CHECKS:
        began = monotonic()
        if began + took_s * (sum(counts) / before) ** 3 > stop:
            break
        checks = [pick_check_ticks(it, count) if count else [] for it, count in zip(problems, counts)]
        orders = _orders_with_checks(profile, updates, problems, checks)
        if orders is None:
            break
        rows = _build_rows(orders, dict(machine.shared), budget_bytes, again)
        solution = solve_relaxation(rows, stop - monotonic())
        if solution is None:
            break
        best_ns = max(best_ns, profile.compute_ns + certified_stall_bound_ns(rows, solution.prices))
        took_s, before = monotonic() - began, sum(counts)
    return best_ns


def _orders_with_checks(
    profile: Profile, updates: Sequence[Update], problems: Sequence[Problem], checks: Sequence[Sequence[int]]
) -> _Orders | None:
    """Return the orders, with the checks of both of them. A check at an update becomes a check at the next
    kernel that is no update. Return None if there is no check.
    """
    order = order_of_kernels(profile, updates)
    after = {tick: at for at, tick in enumerate(order)}
    moved = {update.tick for update in updates}
    fixed = [tick for tick in range(len(order)) if tick not in moved]
    if not fixed:
        return None
    chosen: set[int] = set()
    for tick in checks[0]:
        chosen.add(next((each for each in fixed if each >= tick), fixed[-1]))
    for tick in checks[1]:
        chosen.add(next((each for each in fixed if after[each] >= tick), fixed[-1]))
    if not chosen:
        return None
    users: dict[int, int] = defaultdict(int)
    for index, tensor in enumerate(profile.tensors):
        users[index] += len(moved.intersection((*tensor.reads, *tensor.writes)))
    step_checks = tuple(sorted(chosen))
    return _Orders(
        problems[0],
        problems[1],
        step_checks,
        tuple(after[tick] for tick in step_checks),
        tuple(order),
        frozenset(moved),
        frozenset(index for index, count in users.items() if count == 1),
        frozenset(index for index, count in users.items() if count > 1),
    )


def _build_rows(
    orders: _Orders, shared: Mapping[str, int], budget_bytes: int, again: Sequence[RecomputeOption]
) -> Rows:
    rows = Rows(len(orders.step_checks), len(orders.step_checks))
    of_updates = orders.movable | orders.omitted
    options = [each for each in again if each.tensor not in of_updates]
    some, none = RecomputeFractions(orders.step, options, rows), RecomputeFractions(orders.late, (), rows)
    step = RelaxationBuilder(orders.step, shared, orders.step_checks, rows, some)
    late = RelaxationBuilder(orders.late, shared, orders.late_checks, rows, none)
    late.share_terms_with(step)
    fixed: list[Version] = []
    in_step: dict[int, list[tuple[VersionKey, tuple[int, ...]]]] = defaultdict(list)
    in_late: dict[int, list[tuple[VersionKey, tuple[int, ...]]]] = defaultdict(list)
    for key, gaps, size in versions_by_checks(orders.step, orders.step_checks):
        tensor = orders.step.gaps[gaps[0]].tensor
        if tensor in orders.movable:
            in_step[tensor].append((key, gaps))
        elif tensor not in orders.omitted:
            fixed.append((key, gaps, size))
    for key, gaps, _ in versions_by_checks(orders.late, orders.late_checks):
        tensor = orders.late.gaps[gaps[0]].tensor
        if tensor in orders.movable:
            in_late[tensor].append((key, gaps))
    for group in group_alike_versions(fixed):
        step.add_group(group)
    _add_movable_groups(orders, rows, (step, late), (in_step, in_late))
    step.add_limit_rows(budget_bytes, _live_bytes(orders), _longest_intervals_ns(orders))
    some.add_recompute_time_rows(orders.step_checks)
    return rows


def _add_movable_groups(
    orders: _Orders,
    rows: Rows,
    builders: tuple[RelaxationBuilder, RelaxationBuilder],
    versions: tuple[Versions, Versions],
) -> None:
    """Add the groups of tensors that updates use. Tensors with equal keys in both orders are one group."""
    alike: dict[object, list[int]] = defaultdict(list)
    for tensor in sorted(orders.movable):
        keys = [sorted(versions_of.get(tensor, ()), key=repr) for versions_of in versions]
        more = _live_difference(orders, tensor)
        if any(keys) or any(more):
            alike[tuple(tuple(key for key, _ in each) for each in keys), more].append(tensor)
    for (_, more), members in alike.items():  # type: ignore[misc]
        sizes = tuple(orders.step.profile.tensors[tensor].size_bytes for tensor in members)
        part = rows.add_unknown()
        for check, difference in enumerate(more):
            if difference:
                builders[0].at_check[check].append((part, -difference * sum(sizes)))
        for builder, versions_of, more_terms, most in zip(
            builders, versions, ([(part, 1)], [(part, -1)]), (1, 0), strict=True
        ):
            by_tensor = [sorted(versions_of.get(tensor, ()), key=repr) for tensor in members]
            with builder.limited(more_terms, most):
                for number, (key, _) in enumerate(by_tensor[0]):
                    gaps = tuple(each[number][1] for each in by_tensor)
                    builder.add_group(VersionGroup(*key[:3], gaps, sizes))


def _live_difference(orders: _Orders, tensor: int) -> tuple[int, ...]:
    """Return, for each check, 1 if the tensor is alive only in the late order, -1 if only in the other order,
    and 0 otherwise.
    """
    ticks = orders.step.ticks_per_step
    step, late = (problem.profile.tensors[tensor] for problem in (orders.step, orders.late))
    return tuple(
        int(late.is_alive_at(late_tick, ticks)) - int(step.is_alive_at(step_tick, ticks))
        for step_tick, late_tick in zip(orders.step_checks, orders.late_checks, strict=True)
    )


def _live_bytes(orders: _Orders) -> list[int]:
    """Return the live bytes at each check in the profile's order, without omitted and unused tensors."""
    tensors, ticks = orders.step.profile.tensors, orders.step.ticks_per_step
    unused = sum(gap.size_bytes for gap in orders.step.gaps if gap.unused)
    found = []
    for check in orders.step_checks:
        omitted = sum(
            tensors[it].size_bytes for it in orders.omitted if tensors[it].is_alive_at(check, ticks)
        )
        found.append(int(orders.step.live[check]) - unused - omitted)
    return found


def _longest_intervals_ns(orders: _Orders) -> list[int]:
    """Return the time of the kernels of each interval. An update counts in its interval of both orders."""
    step = [kernel.duration_ns for kernel in orders.step.profile.kernels]
    late = [step[tick] if tick in orders.moved else 0 for tick in orders.late_order]
    lengths = interval_lengths_ns(step, orders.step_checks), interval_lengths_ns(late, orders.late_checks)
    return [one + more for one, more in zip(*lengths, strict=True)]
