"""A lower bound for all placements of updates: at the end of the step, late, or in the backward.

In: a profile, a machine, a budget, the allowed places. Out: a step time that no plan can beat, wherever its
updates run.

The relaxation of one order of kernels (relaxation.py) is built several times, into the same rows. The first
order is that of the profile. In each other order, all updates that can run at one other place do so. The
checks are kernels that are no updates, so all orders have the same checks and intervals. Each tensor of an
update has a set of unknowns for each place. It has one more unknown for each other place: the part of its
bytes whose update runs there.

    parts of a tensor                          sum to at most 1; the rest is updated at the end of the step
    evicted fractions in the profile's order   <= 1 - sum of the tensor's parts
    evicted fractions in another order         <= the tensor's part there
    live bytes at a check                       = live bytes in the profile's order + sum of part x difference
    kernels' time of an interval                = time in the profile's order + sum of part x difference

A plan with any placement is a solution: one part of each update is 1, and the others are 0. Each tensor of an
update has its own parts, because alike tensors of several updates are one group. The group's part is the mean
of its tensors' parts by bytes. The time of an update belongs to its largest tensor. A tensor that several
updates use is left out: its bytes need no memory, and no link.

If plans may recompute tensors, the first builder has the unknowns of recompute_terms.py, too. A recomputed
tensor belongs to no update, so its rows are the same for all orders. A kernel that runs again may read the
weight of an update, which then runs later in the backward. If this can happen, the tensors of the update are
left out, too, and its time counts in each interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.formats.recompute import find_recompute_gaps
from teraio.formats.updates import (
    Update,
    find_backward_updates,
    find_updates,
    order_of_kernels,
    profile_with_updates,
    weights_of,
)

from ..problem.problem import Problem, build_problem
from .bound import lower_bound, pick_check_ticks, split_intervals_where_prices_change
from .certificate import Solution, certified_stall_bound_ns, solve_relaxation
from .recompute_terms import RecomputeFractions, RecomputeOption, find_recompute_options
from .relaxation import (
    Relaxation,
    RelaxationBuilder,
    Version,
    VersionGroup,
    VersionKey,
    group_alike_versions,
    interval_lengths_ns,
    versions_by_checks,
)
from .rows import Rows, Terms

# Numbers of check kernels, by the order in which they are picked: the profile's order, and the order with all
# updates late. The bound is the largest of all rounds. For 8B and 70B the first round takes 0.2 s to 0.7 s,
# and finds all but 1 % of the bound. Checks of the late order alone found bounds lower by 3 % to 6 %.
CHECKS = ((12, 0), (10, 10), (16, 8), (24, 12))
# Number of the first check kernels, if updates may run in the backward. They are picked in the order with all
# updates in the backward. Checks in the other orders took more time, and gave the same bounds.
BACKWARD_CHECKS = 8

Versions = Mapping[int, Sequence[tuple[VersionKey, tuple[int, ...]]]]  # by tensor: keys, and their gaps


@dataclass(frozen=True, slots=True)
class _Order:
    """An order of kernels, with its problem.

    place      the place of the updates: `step`, `late` or `backward`
    kernels    the kernels of this order, as ticks of the profile
    moved      ticks, in the profile, of the updates that run at the other place. The profile's order has none
    """

    place: str
    problem: Problem
    kernels: tuple[int, ...]
    moved: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Orders:
    """All orders of kernels, with the same check kernels. The first is the order of the profile.

    checks     for each order: the ticks of the checks
    update     tensor that one update uses -> tick of the update in the profile
    omitted    tensors whose bytes do not count: several updates use them, or an update at an unknown place
    unknown    ticks of the updates whose place in the backward is unknown
    """

    orders: tuple[_Order, ...]
    checks: tuple[tuple[int, ...], ...]
    update: Mapping[int, int]
    omitted: frozenset[int]
    unknown: frozenset[int]

    @property
    def step(self) -> Problem:
        return self.orders[0].problem

    @property
    def moved(self) -> frozenset[int]:
        """Return the ticks of the updates that run at another place in some order."""
        return frozenset[int]().union(*(order.moved for order in self.orders))


def lower_bound_of_placements_ns(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    keep: Collection[str],
    time_limit_s: float,
    recompute: bool = False,
    backward: bool = False,
) -> int:
    """Return a lower bound on the step time of all plans, with any late updates. If `backward` is True, the
    plans may also have any updates in the backward. The bound is at least the time of all kernels. If
    `recompute` is True, the plans may recompute any tensors.
    """
    stop, best_ns = monotonic() + time_limit_s, profile.compute_ns
    problem = build_problem(profile, machine, keep)
    again = find_recompute_options(problem) if recompute else ()
    orders, unknown = _all_orders(problem, machine, keep, recompute, backward)
    if len(orders) == 1 and not unknown:
        return lower_bound(problem, machine, budget_bytes, time_limit_s=time_limit_s, again=again).step_ns
    took_s, before, rounds = 0.0, 1, 0
    refined = orders[-1].place == "backward"
    first = (*(0 for _ in orders[1:]), BACKWARD_CHECKS) if refined else CHECKS[0]
    checks = _pick_checks(orders, unknown, first)
    while checks:
        began = monotonic()
        if began + took_s * (len(checks) / before) ** 3 > stop:
            break
        made = _orders_with_checks(orders, unknown, checks)
        relaxation = _build_relaxation(made, dict(machine.shared), budget_bytes, again)
        solution = solve_relaxation(relaxation.rows, stop - monotonic())
        if solution is None:
            break
        found_ns = certified_stall_bound_ns(relaxation.rows, solution.prices)
        best_ns = max(best_ns, profile.compute_ns + found_ns)
        took_s, before, rounds = monotonic() - began, len(checks), rounds + 1
        if refined:
            calm = found_ns == 0 and rounds == 1
            more = _pick_checks(orders, unknown, (*first[:-1], 2 * BACKWARD_CHECKS)) if calm else frozenset()
            checks = more or _split_intervals(made, checks, relaxation, solution)
        else:
            checks = _pick_checks(orders, unknown, CHECKS[rounds]) if rounds < len(CHECKS) else frozenset()
    return best_ns


def _all_orders(
    problem: Problem, machine: Machine, keep: Collection[str], recompute: bool, backward: bool
) -> tuple[tuple[_Order, ...], frozenset[int]]:
    """Return the orders of kernels, and the ticks of the updates whose other places are unknown. The order
    with updates in the backward is last.
    """
    profile, unknown = problem.profile, frozenset[int]()
    orders = [_Order("step", problem, tuple(range(len(profile.kernels))), frozenset())]
    late, early = find_updates(profile), find_backward_updates(profile) if backward else ()
    if early:
        unknown = _late_updates_at_unknown_places(profile, late, early)
    if early and recompute:
        unknown |= _updates_read_by_reruns(profile, early)
    for place, updates in (("late", late), ("backward", early)):
        known = tuple(update for update in updates if update.tick not in unknown)
        if known:
            step = profile_with_updates(profile, **{place: weights_of(known)})
            moved = frozenset(update.tick for update in known)
            kernels = tuple(order_of_kernels(profile, known))
            orders.append(_Order(place, build_problem(step, machine, keep), kernels, moved))
    return tuple(orders), unknown


def _late_updates_at_unknown_places(
    profile: Profile, late: Sequence[Update], early: Sequence[Update]
) -> frozenset[int]:
    """Return the ticks of the updates that run late at another place if other updates run in the backward."""
    order = order_of_kernels(profile, early)
    after = find_updates(profile_with_updates(profile, backward=weights_of(early)))
    moved = {update.tick for update in early}
    places = {order[update.tick]: order[update.before] for update in after}
    known = {update.tick: update.before for update in late}
    return frozenset(tick for tick in {*places, *known} - moved if places.get(tick) != known.get(tick))


def _updates_read_by_reruns(profile: Profile, updates: Sequence[Update]) -> frozenset[int]:
    """Return the ticks of the updates whose tensors a rerun may read after the place in the backward."""
    latest: dict[int, int] = defaultdict(int)  # by kernel: the last tick before which it may run again
    for index, gap in find_recompute_gaps(profile).items():
        for tick in profile.tensors[index].recompute_from:
            latest[tick] = max(latest[tick], gap.first)
    last: dict[int, int] = defaultdict(int)  # by update: the last tick before which a rerun may read a tensor
    for tensor in profile.tensors:
        reruns = [latest[tick] for tick in (*tensor.reads, *tensor.writes) if tick in latest]
        for tick in {*tensor.reads, *tensor.writes}:
            last[tick] = max([last[tick], *reruns])
    return frozenset(update.tick for update in updates if last[update.tick] > update.before)


def _pick_checks(
    orders: tuple[_Order, ...], unknown: frozenset[int], counts: Sequence[int]
) -> frozenset[int]:
    """Return check kernels, as ticks of the profile: from each order, as many as `counts` has for it."""
    chosen: set[int] = set()
    for order, count in zip(orders, counts):
        if count:
            chosen |= _fixed_kernels(orders, unknown, order, pick_check_ticks(order.problem, count))
    return frozenset(chosen)


def _split_intervals(
    orders: _Orders, checks: frozenset[int], relaxation: Relaxation, solution: Solution
) -> frozenset[int]:
    """Return more check kernels, in the intervals where the prices of links change most. Return no check
    kernels if there are no more.
    """
    last = orders.orders[-1]
    found = split_intervals_where_prices_change(last.problem, relaxation, solution)
    more = _fixed_kernels(orders.orders, orders.unknown, last, found)
    return more | checks if more - checks else frozenset()


def _fixed_kernels(
    orders: tuple[_Order, ...], unknown: frozenset[int], order: _Order, ticks: Sequence[int]
) -> frozenset[int]:
    """Return the kernels at these ticks of an order, as ticks of the profile. Replace each update by the next
    kernel that is no update.
    """
    moved = unknown.union(*(each.moved for each in orders))
    fixed = [at for at, tick in enumerate(order.kernels) if tick not in moved]
    if not fixed:
        return frozenset()
    return frozenset(order.kernels[next((at for at in fixed if at >= tick), fixed[-1])] for tick in ticks)


def _orders_with_checks(
    orders: tuple[_Order, ...], unknown: frozenset[int], chosen: frozenset[int]
) -> _Orders:
    profile = orders[0].problem.profile
    moved = unknown.union(*(order.moved for order in orders))
    update: dict[int, int] = {}
    omitted: set[int] = set()
    for index, tensor in enumerate(profile.tensors):
        users = moved.intersection((*tensor.reads, *tensor.writes))
        if len(users) > 1 or unknown & users:
            omitted.add(index)
        elif users:
            update[index] = min(users)
    checks = tuple(tuple(at for at, tick in enumerate(order.kernels) if tick in chosen) for order in orders)
    return _Orders(orders, checks, update, frozenset(omitted), unknown)


def _build_relaxation(
    orders: _Orders, shared: Mapping[str, int], budget_bytes: int, again: Sequence[RecomputeOption]
) -> Relaxation:
    """Return the relaxation of all orders. Its checks are ticks of the last order."""
    count = len(orders.checks[0])
    rows = Rows(count, count)
    options = [
        each for each in again if each.tensor not in orders.update and each.tensor not in orders.omitted
    ]
    builders: list[RelaxationBuilder] = []
    for order, checks in zip(orders.orders, orders.checks, strict=True):
        recomputed = RecomputeFractions(order.problem, () if builders else options, rows)
        builders.append(RelaxationBuilder(order.problem, shared, checks, rows, recomputed))
        builders[-1].share_terms_with(builders[0])
    fixed: list[Version] = []
    movable: list[dict[int, list[tuple[VersionKey, tuple[int, ...]]]]] = []
    for order, checks in zip(orders.orders, orders.checks, strict=True):
        movable.append(defaultdict(list))
        for key, gaps, size in versions_by_checks(order.problem, checks):
            tensor = order.problem.gaps[gaps[0]].tensor
            if tensor in orders.update:
                movable[-1][tensor].append((key, gaps))
            elif tensor not in orders.omitted and len(movable) == 1:
                fixed.append((key, gaps, size))
    for group in group_alike_versions(fixed):
        builders[0].add_group(group)
    _add_movable_groups(orders, rows, builders, movable)
    timed = builders[0].add_limit_rows(budget_bytes, _live_bytes(orders), _interval_lengths_ns(orders))
    builders[0].again.add_recompute_time_rows(orders.checks[0])
    return Relaxation(rows, orders.checks[-1], (), timed)


def _add_movable_groups(
    orders: _Orders, rows: Rows, builders: Sequence[RelaxationBuilder], versions: Sequence[Versions]
) -> None:
    """Add the groups of tensors that updates use. Tensors with equal keys in all orders are one group."""
    alike: dict[object, list[int]] = defaultdict(list)
    intervals = [_interval_by_kernel(orders, at) for at in range(len(orders.orders))]
    largest = _largest_tensors(orders)
    _add_times_everywhere(orders, builders[0], intervals)
    for tensor, tick in sorted(orders.update.items()):
        places = tuple(at for at, order in enumerate(orders.orders) if not at or tick in order.moved)
        keys = [sorted(versions[at].get(tensor, ()), key=repr) for at in places]
        more = tuple(_live_difference(orders, at, tensor) for at in places)
        timed = tuple(intervals[at][tick] for at in places) if tensor in largest else ()
        if any(keys) or any(map(any, more)) or timed:
            alike[places, tuple(tuple(key for key, _ in each) for each in keys), more, timed].append(tensor)
    for (places, _, more, timed), members in alike.items():  # type: ignore[misc]
        sizes = tuple(orders.step.profile.tensors[tensor].size_bytes for tensor in members)
        parts = {at: rows.add_unknown() for at in places[1:]}
        if len(parts) > 1:
            rows.add_row(None, 1, [(part, 1) for part in parts.values()])
        for at, differences in zip(places, more, strict=True):
            for check, difference in enumerate(differences):
                if difference:
                    builders[0].at_check[check].append((parts[at], -difference * sum(sizes)))
        if timed:
            _add_times_of_updates(orders, builders[0], members, dict(zip(places, timed, strict=True)), parts)
        for at in places:
            limit: Terms = [(parts[at], -1)] if at else [(part, 1) for part in parts.values()]
            by_tensor = [sorted(versions[at].get(tensor, ()), key=repr) for tensor in members]
            with builders[at].limited(limit, int(at == 0)):
                for number, (key, _) in enumerate(by_tensor[0]):
                    gaps = tuple(each[number][1] for each in by_tensor)
                    builders[at].add_group(VersionGroup(*key[:3], gaps, sizes))


def _largest_tensors(orders: _Orders) -> frozenset[int]:
    """Return the largest tensor of each update that can run at several places."""
    tensors = orders.step.profile.tensors
    largest: dict[int, int] = {}
    for tensor, tick in orders.update.items():
        if tick not in largest or tensors[tensor].size_bytes > tensors[largest[tick]].size_bytes:
            largest[tick] = tensor
    return frozenset(largest.values())


def _add_times_of_updates(
    orders: _Orders,
    builder: RelaxationBuilder,
    members: Sequence[int],
    intervals: Mapping[int, int],
    parts: Mapping[int, int],
) -> None:
    """Add the time that moves between intervals with the parts of the updates. `members` has one tensor of
    each update, and `intervals` the interval of the updates in each order.

    The parts are means by bytes. So the time of an update is divided in two. The one part is proportional to
    the bytes, and moves. The rest counts in the intervals of all orders.
    """
    profile = orders.step.profile
    times = [
        (profile.kernels[orders.update[member]].duration_ns, max(profile.tensors[member].size_bytes, 1))
        for member in members
    ]
    size = sum(own for _, own in times)
    moving_ns = min(ns * size // own for ns, own in times)
    rest_ns = sum(ns for ns, _ in times) - moving_ns
    for at, part in parts.items():
        if intervals[at] != intervals[0]:
            builder.add_time_of_part(intervals[0], part, -moving_ns)
            builder.add_time_of_part(intervals[at], part, moving_ns)
    for interval in {*intervals.values()} - {intervals[0]}:
        builder.add_time(interval, rest_ns)


def _add_times_everywhere(
    orders: _Orders, builder: RelaxationBuilder, intervals: Sequence[Mapping[int, int]]
) -> None:
    """Add the time of the updates without a tensor of their own to their intervals in all orders."""
    for tick in orders.moved.difference(orders.update.values()):
        ns = orders.step.profile.kernels[tick].duration_ns
        for interval in {own[tick] for own in intervals} - {intervals[0][tick]}:
            builder.add_time(interval, ns)


def _interval_by_kernel(orders: _Orders, at: int) -> dict[int, int]:
    """Return the interval of each kernel, a tick of the profile, in the order number `at`."""
    found: dict[int, int] = {}
    interval, checks = -1, set(orders.checks[at])
    for own, tick in enumerate(orders.orders[at].kernels):
        interval += own in checks
        found[tick] = interval % len(checks)
    return found


def _live_difference(orders: _Orders, at: int, tensor: int) -> tuple[int, ...]:
    """Return, for each check, 1 if the tensor is alive only in the order number `at`, -1 if only in the
    profile's order, and 0 otherwise.
    """
    ticks = orders.step.ticks_per_step
    own, first = (orders.orders[it].problem.profile.tensors[tensor] for it in (at, 0))
    return tuple(
        int(own.is_alive_at(own_tick, ticks)) - int(first.is_alive_at(step_tick, ticks))
        for step_tick, own_tick in zip(orders.checks[0], orders.checks[at], strict=True)
    )


def _live_bytes(orders: _Orders) -> list[int]:
    """Return the live bytes at each check in the profile's order, without omitted and unused tensors."""
    tensors, ticks = orders.step.profile.tensors, orders.step.ticks_per_step
    unused = sum(gap.size_bytes for gap in orders.step.gaps if gap.unused)
    found = []
    for check in orders.checks[0]:
        omitted = sum(
            tensors[it].size_bytes for it in orders.omitted if tensors[it].is_alive_at(check, ticks)
        )
        found.append(int(orders.step.live[check]) - unused - omitted)
    return found


def _interval_lengths_ns(orders: _Orders) -> list[int]:
    """Return the time of the kernels of each interval in the profile's order. An update at an unknown place
    counts in each interval.
    """
    kernels = orders.step.profile.kernels
    durations = [0 if tick in orders.unknown else each.duration_ns for tick, each in enumerate(kernels)]
    everywhere = sum(kernels[tick].duration_ns for tick in orders.unknown)
    return [length + everywhere for length in interval_lengths_ns(durations, orders.checks[0])]
