"""The linear relaxation of planning, in integers. In: a problem, a budget, check kernels. Out: sparse rows.

Time is cut at the starts of a few *check* kernels into intervals, cyclic like the step. Bytes are a fluid:

    check u            check u+1          check u+2          (unrolled: u may lie in the next step)
    |--- interval u ---|--- interval u+1 -|
    away[u] ---------- away[u+1]                             away[u+1] = away[u] + written[u] - read[u]

Unknown are the stall of each interval and, for each group of versions that see the same checks, which
fraction is written in an interval, which is away at a check, which is read in an interval. Rows: what lives
beyond the budget at a check is away; the transfers of a link fit into the interval and its stall, and so do
those of links that share a bandwidth; a slow tier holds what is away in it. They hold for what any plan does:

- A transfer runs while its lane does, so the share of its time that has passed is the fraction moved. A write
  starts after the kernel that made the bytes, also while they are still read. Its bytes are gone, at the
  earliest, when it ends; those of a fetch count from its trigger, before it starts. So what is away at a
  check in truth is no more than the fluid's.
- A version is written once per tier and leaves for nothing afterwards; one that no kernel makes always does.
- Steps that differ from each other average to a point of the relaxation, because it is convex.
- Where links share a bandwidth, one that could take more than its part of it loses time to each other one
  that moves bytes meanwhile.
- The latency of a transfer is part of its time, but not where links share a bandwidth: it moves no bytes.
- In a group every byte moves at the price of the cheapest.
- What is fetched within a gap and leaves again might as well have stayed away.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations

from teraio.formats.machine import Link

from ..problem.problem import Problem, Route, transfer_ns
from .recompute_terms import RecomputeFractions, RecomputeOption
from .rows import NS_PER_S, Rows, Terms


@dataclass(frozen=True, slots=True)
class VersionGroup:
    """Versions whose gaps contain the same checks.

    `born`: the first check after the kernel that makes them, None if none does. `gaps`: first and last check
    of each gap, unrolled. `members`: for each version its gaps, as indices into `problem.gaps`. `alone`: they
    are the only versions of persistent tensors, so that a copy takes room all step long.
    """

    born: int | None
    gaps: tuple[tuple[int, int], ...]
    alone: bool
    members: tuple[tuple[int, ...], ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EvictedUnknowns:
    """The unknowns of what is away of a group in one gap: [route][check in the gap]."""

    group: VersionGroup
    gap: int
    columns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """`timed`: (lane, interval, row) for each row that says that transfers fit into an interval."""

    rows: Rows
    checks: tuple[int, ...]
    away: tuple[EvictedUnknowns, ...]
    timed: tuple[tuple[Link | str, int, int], ...]
    again: dict[int, int] = field(default_factory=dict)  # tensor -> the fraction of it that is made again


def build_relaxation(
    problem: Problem,
    shared: Mapping[str, int],
    budget_bytes: int,
    checks: Sequence[int],
    again: Sequence[RecomputeOption] = (),
) -> Relaxation:
    """The relaxation with these check kernels, which rise. `shared`: bandwidths by the names links share.
    `again`: what may be made again (recompute_terms.py)."""
    rows = Rows(len(checks), len(checks))
    builder = _Builder(problem, shared, tuple(checks), rows, RecomputeFractions(problem, again, rows))
    for group in _group_versions_by_checks(problem, checks):
        if len(group.gaps) == 1 and group.born is not None:
            builder.add_single_gap_group(group, group.born)
        else:
            builder.add_multi_gap_group(group)
    timed = builder.add_limit_rows(budget_bytes)
    builder.again.add_recompute_time_rows(checks)
    return Relaxation(rows, tuple(checks), tuple(builder.away), timed, builder.again.columns)


def _group_versions_by_checks(problem: Problem, checks: Sequence[int]) -> list[VersionGroup]:
    ticks, count = len(problem.live), len(checks)
    versions: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    versions_of: dict[int, int] = defaultdict(int)
    for index, gap in enumerate(problem.gaps):
        if not gap.unused:
            versions_of[gap.tensor] += (gap.tensor, gap.version) not in versions
            versions[gap.tensor, gap.version].append(index)

    def first_check_after(tick: int) -> int:
        return tick // ticks * count + bisect_right(checks, tick % ticks)

    def last_check_before(tick: int) -> int:
        return tick // ticks * count + bisect_left(checks, tick % ticks) - 1

    found: dict[tuple[object, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for (tensor, version), indices in versions.items():
        spans = []
        for index in indices:
            gap = problem.gaps[index]
            start = gap.start if version is None else version + (gap.start - version) % ticks
            first, last = first_check_after(start), last_check_before(start + gap.end - gap.start)
            if first <= last:
                spans.append((first, last, index))
        if not spans:
            continue
        spans.sort()
        born = spans[0][0] if version is None else first_check_after(version)
        lap = born // count * count
        gaps = tuple((first - lap, last - lap) for first, last, _ in spans)
        alone = problem.profile.tensors[tensor].persistent and versions_of[tensor] == 1
        size = problem.gaps[indices[0]].size_bytes
        key = (None if version is None else born - lap, gaps, alone, _latency_class(problem, size))
        found[key].append((tuple(index for _, _, index in spans), size))
    return [
        VersionGroup(key[0], key[1], key[2], tuple(m for m, _ in members), tuple(size for _, size in members))  # type: ignore[arg-type]
        for key, members in found.items()
    ]


def _latency_class(problem: Problem, size_bytes: int) -> tuple[int, ...]:
    """What latency adds to a transfer of this size, in steps of 2 % of its time, up to twice its time.

    A group counts at the price of its cheapest, so those of one group should cost about the same.
    """
    return tuple(
        min(50 * link.latency_ns * link.bandwidth_bytes_per_s // (size_bytes * NS_PER_S), 100)
        for route in problem.routes
        for link in (route.out, route.back)
    )


@dataclass(slots=True)
class _Builder:
    """Rows under construction. What links, tiers and checks carry is collected until the end."""

    problem: Problem
    shared: Mapping[str, int]
    checks: tuple[int, ...]
    rows: Rows
    again: RecomputeFractions
    away: list[EvictedUnknowns] = field(default_factory=list)
    on_link: dict[tuple[Link, int], Terms] = field(default_factory=lambda: defaultdict(list))
    on_shared: dict[tuple[str, int], Terms] = field(default_factory=lambda: defaultdict(list))
    at_check: list[Terms] = field(default_factory=list)
    in_tier: dict[tuple[Route, int], Terms] = field(default_factory=lambda: defaultdict(list))
    held: dict[Route, Terms] = field(default_factory=lambda: defaultdict(list))  # all step long
    scarce: tuple[bool, ...] = ()  # by route: not everything that may move has room in this tier

    def __post_init__(self) -> None:
        self.at_check = [[] for _ in self.checks]
        sizes = {gap.tensor: gap.size_bytes for gap in self.problem.gaps}
        self.scarce = tuple(route.capacity_bytes < sum(sizes.values()) for route in self.problem.routes)

    def add_single_gap_group(self, group: VersionGroup, born: int) -> None:
        """One gap of a version that a kernel made: what is written leaves, what is read is back."""
        first, last = group.gaps[0]
        columns = []
        for route in self.problem.routes:
            away = tuple(self.rows.add_unknown() for _ in range(first, last + 1))
            columns.append(away)
            terms: Terms = [(away[0], 1)]
            for check in range(born, last + 1):
                written = self.rows.add_unknown()
                terms.append((written, -1))
                self._charge_link_time(route.out, check - 1, group, [(written, 1)])
                if check < first:
                    continue
                self.rows.add_row(0, 0, terms)
                if check < last:
                    read = self.rows.add_unknown()
                    self._charge_link_time(route.back, check, group, [(read, 1)])
                    terms = [(away[check + 1 - first], 1), (away[check - first], -1), (read, 1)]
            self._charge_link_time(route.back, last, group, [(away[-1], 1)])
        self._add_evicted_bytes_terms(group, 0, tuple(columns))

    def add_multi_gap_group(self, group: VersionGroup) -> None:
        """Several gaps of a version: what is written stays good, and up to so much is away in each of them.
        A version that no kernel makes needs no write."""
        copies: list[dict[int, int]] = []
        for route in self.problem.routes:
            copy: dict[int, int] = {}
            if group.born is not None:
                for check in range(group.born, group.gaps[-1][1] + 1):
                    copy[check] = self.rows.add_unknown()
                    more = [(copy[check], 1)]
                    if check > group.born:
                        more.append((copy[check - 1], -1))
                        self.rows.add_row(0, None, more)
                    self._charge_link_time(route.out, check - 1, group, more)
            copies.append(copy)
        for index, (first, last) in enumerate(group.gaps):
            columns = []
            for route, copy in zip(self.problem.routes, copies, strict=True):
                away = tuple(self.rows.add_unknown() for _ in range(first, last + 1))
                columns.append(away)
                for check, column in enumerate(away, first):
                    if copy:
                        self.rows.add_row(0, None, [(copy[check], 1), (column, -1)])
                    if check < last:
                        read = self.rows.add_unknown()
                        self.rows.add_row(0, None, [(read, 1), (column, -1), (away[check + 1 - first], 1)])
                        self._charge_link_time(route.back, check, group, [(read, 1)])
                self._charge_link_time(route.back, last, group, [(away[-1], 1)])
            self._add_evicted_bytes_terms(group, index, tuple(columns))

    def _charge_link_time(self, link: Link, interval: int, group: VersionGroup, fractions: Terms) -> None:
        """The time that fractions of the group's transfers take on a link in an interval."""
        interval %= len(self.checks)
        size = sum(group.sizes_bytes)
        if link.shares is None:
            cost_ns = min(transfer_ns(link, one) * size // one for one in set(group.sizes_bytes))
        else:
            cost_ns = size * NS_PER_S // link.bandwidth_bytes_per_s
            shared = [(column, sign * size) for column, sign in fractions]
            self.on_shared[link.shares, interval] += shared
        self.on_link[link, interval] += [(column, sign * cost_ns) for column, sign in fractions]

    def _add_evicted_bytes_terms(
        self, group: VersionGroup, gap: int, columns: tuple[tuple[int, ...], ...]
    ) -> None:
        """What is away counts at checks and in tiers, and is at most everything."""
        first, size = group.gaps[gap][0], sum(group.sizes_bytes)
        self.away.append(EvictedUnknowns(group, gap, columns))
        for route, scarce, away in zip(self.problem.routes, self.scarce, columns, strict=True):
            hold = self.rows.add_unknown() if scarce and group.alone else -1
            if hold >= 0:
                self.held[route].append((hold, size))
            for check, column in enumerate(away, first):
                self.at_check[check % len(self.checks)].append((column, size))
                if hold >= 0:
                    self.rows.add_row(0, None, [(hold, 1), (column, -1)])
                elif scarce:
                    self.in_tier[route, check % len(self.checks)].append((column, size))
        again = self.again.add_unknown_for_gaps([gaps[gap] for gaps in group.members], group.sizes_bytes)
        for check, together in enumerate(zip(*columns, strict=True), first):
            parts = [(column, 1) for column in together]
            if again >= 0:
                parts.append((again, 1))
                self.at_check[check % len(self.checks)].append((again, size))
            if len(parts) > 1:
                self.rows.add_row(None, 1, parts)

    def add_limit_rows(self, budget_bytes: int) -> tuple[tuple[Link | str, int, int], ...]:
        """The rows in which all groups meet. Out: which of them are about time."""
        problem, checks = self.problem, self.checks
        durations = [kernel.duration_ns for kernel in problem.profile.kernels]
        lengths_ns = [sum(durations[a:b]) for a, b in pairwise(checks)]
        lengths_ns.append(sum(durations[checks[-1] :]) + sum(durations[: checks[0]]))
        unused = sum(gap.size_bytes for gap in problem.gaps if gap.unused)
        for check, terms in zip(checks, self.at_check, strict=True):
            beyond = int(problem.live[check]) - unused - budget_bytes
            if beyond > 0:
                self.rows.add_row(beyond, None, terms)
        timed: list[tuple[Link | str, int, int]] = []
        for (link, interval), terms in self.on_link.items():
            timed.append((link, interval, len(self.rows.low)))
            self.rows.add_row(None, lengths_ns[interval], [*_merge_terms(terms), (interval, -1)])
        for one, other, slower in self._slowed_link_pairs():
            for interval in range(len(checks)):
                lost = [(column, _scale_ns(ns, slower)) for column, ns in self.on_link[other, interval]]
                timed.append((f"{_link_name(one)} beside {_link_name(other)}", interval, len(self.rows.low)))
                terms = [*_merge_terms([*self.on_link[one, interval], *lost]), (interval, -1)]
                self.rows.add_row(None, lengths_ns[interval], terms)
        for (name, interval), terms in self.on_shared.items():
            rate = self.shared[name]
            times = [(column, size * NS_PER_S // rate) for column, size in _merge_terms(terms)]
            timed.append((name, interval, len(self.rows.low)))
            self.rows.add_row(None, lengths_ns[interval], [*times, (interval, -1)])
        for route, scarce in zip(problem.routes, self.scarce, strict=True):
            for check in range(len(checks)) if scarce else ():
                terms = [*self.in_tier[route, check], *self.held[route]]
                self.rows.add_row(None, route.capacity_bytes, terms)
        return tuple(timed)

    def _slowed_link_pairs(self) -> Iterator[tuple[Link, Link, int]]:
        """Each link that is slower than alone while another moves bytes, that other one, and what the first
        loses of a second of its time by each second of the other's, in ns."""
        sharing = list(dict.fromkeys(link for link, _ in self.on_link if link.shares is not None))
        for one, other in permutations(sharing, 2):
            if one.shares is None or one.shares != other.shares:
                continue
            alone, others = one.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s
            whole = self.shared[one.shares]
            rate = min(alone, max(-(-whole // 2), whole - others))  # at most, if both move
            others_rate = min(others, max(-(-whole // 2), whole - alone))
            if rate < alone:
                yield one, other, others * (alone - rate) * NS_PER_S // (others_rate * alone)


def _scale_ns(ns: int, of_second: int) -> int:
    """So many ns of each second, rounded towards nothing."""
    return ns * of_second // NS_PER_S if ns >= 0 else -(-ns * of_second // NS_PER_S)


def _link_name(link: Link) -> str:
    return f"{link.source}>{link.target}"


def _merge_terms(terms: Terms) -> Terms:
    """An unknown may stand in both links of a row, or in both ends of an interval: one entry each."""
    sums: dict[int, int] = defaultdict(int)
    for column, factor in terms:
        sums[column] += factor
    return [(column, factor) for column, factor in sums.items() if factor]
