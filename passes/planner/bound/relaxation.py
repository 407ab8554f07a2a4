"""A linear program whose optimum no plan can beat. In: a problem, a budget, check kernels. Out: sparse rows.

The starts of a few *check* kernels divide the step into intervals. The step repeats, so the last interval
ends at the first check of the next step. Any fraction of a tensor's bytes can move, as if bytes were a fluid:

    check u            check u+1          check u+2          (unrolled: u may lie in the next step)
    |--- interval u ---|--- interval u+1 -|
    evicted[u] ------- evicted[u+1]                evicted[u+1] = evicted[u] + written[u] - read[u]

Each interval has one unknown: its stall, the time of its waits. A *gap* is an idle interval of a tensor. A
*version* is the contents of a tensor from one write to the next. Versions whose gaps contain the same checks
form a *group*. The unknowns of a group are fractions of its bytes: (1) written to a slow tier in an interval,
(2) evicted at a check, (3) read in an interval. The rows are:

    memory    The live bytes beyond the budget at a check must be evicted.
    links     The transfers of a link take at most the time of the interval and its stall. The same limit
              holds for the transfers of all links together that share a bandwidth.
    tiers     A slow tier has room for the bytes that are evicted to it.

Every plan is a solution of the rows, with a step time that is not longer. The reasons, for each rule of the
relaxation:

    fluid     A plan moves whole tensors. When a part of a transfer's time has passed, the fluid has moved the
              same part of the bytes.
    writes    A plan's write starts after the kernel that made the bytes. The bytes on the device are free
              when the write ends, or later. Fetched bytes take memory even before the fetch starts. So at a
              check the fluid evicts at least as many bytes as the plan.
    copies    A version is written once per tier. Its later evictions are drops, without a write. A version
              that no kernel makes needs no write.
    steps     If the steps of a plan differ, their average is a solution, because the rows are convex.
    sharing   A link alone may take more than its part of a shared bandwidth. Such a link loses time while
              another link of the bandwidth moves bytes.
    latency   The time of a transfer includes its latency. For links that share a bandwidth, the latency is
              left out, because no bytes move during the latency.
    groups    Every byte of a group costs as much link time as in the group's cheapest transfer.
    detours   A plan may fetch a tensor within a gap and evict it again. The relaxation leaves the tensor
              evicted, which costs less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, permutations

from teraio.formats.machine import Link

from ..problem.problem import Problem, Route, transfer_ns
from .recompute_terms import RecomputeFractions, RecomputeOption
from .rows import NS_PER_S, Rows, Terms


@dataclass(frozen=True, slots=True)
class VersionGroup:
    """Versions (contents of tensors between two writes) whose gaps contain the same check kernels.

    born       the first check after the kernel that makes the versions; None if no kernel makes them
    gaps       the first and the last check of each gap. The numbers of checks go on in the next step
    alone      True if each version is its persistent tensor's only one. The copy takes room all step long
    members    for each version: its gaps, as indices into `problem.gaps`
    """

    born: int | None
    gaps: tuple[tuple[int, int], ...]
    alone: bool
    members: tuple[tuple[int, ...], ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EvictedUnknowns:
    """The unknowns of one gap of a group. `columns[route][check]` is the fraction that is evicted on this
    route at this check of the gap.
    """

    group: VersionGroup
    gap: int
    columns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The rows of the linear program, and the meaning of their unknowns.

    evicted    the unknowns of evicted fractions
    timed      (link or shared bandwidth, interval, row) for each row that limits the time of transfers
    again      tensor -> unknown for the fraction of the tensor that is recomputed
    """

    rows: Rows
    checks: tuple[int, ...]
    evicted: tuple[EvictedUnknowns, ...]
    timed: tuple[tuple[Link | str, int, int], ...]
    again: dict[int, int] = field(default_factory=dict)


def build_relaxation(
    problem: Problem,
    shared: Mapping[str, int],
    budget_bytes: int,
    checks: Sequence[int],
    again: Sequence[RecomputeOption] = (),
) -> Relaxation:
    """Return the relaxation with these check kernels, which are in the order of the step.

    `shared` maps the name of each bandwidth that links share to its bytes per second. `again` has the tensors
    that may be recomputed (recompute_terms.py).
    """
    rows = Rows(len(checks), len(checks))
    builder = RelaxationBuilder(
        problem, shared, tuple(checks), rows, RecomputeFractions(problem, again, rows)
    )
    for group in group_alike_versions(versions_by_checks(problem, checks)):
        builder.add_group(group)
    unused = sum(gap.size_bytes for gap in problem.gaps if gap.unused)
    live = [int(problem.live[check]) - unused for check in checks]
    durations = [kernel.duration_ns for kernel in problem.profile.kernels]
    timed = builder.add_limit_rows(budget_bytes, live, interval_lengths_ns(durations, checks))
    builder.again.add_recompute_time_rows(checks)
    return Relaxation(rows, tuple(checks), tuple(builder.evicted), timed, builder.again.columns)


VersionKey = tuple[int | None, tuple[tuple[int, int], ...], bool, tuple[int, ...]]


Version = tuple[VersionKey, tuple[int, ...], int]  # key, gaps, size in bytes


def group_alike_versions(versions: Iterable[Version]) -> list[VersionGroup]:
    """Return a group for each key."""
    found: dict[VersionKey, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for key, gaps, size in versions:
        found[key].append((gaps, size))
    return [
        VersionGroup(*key[:3], tuple(gaps for gaps, _ in members), tuple(size for _, size in members))
        for key, members in found.items()
    ]


def versions_by_checks(
    problem: Problem, checks: Sequence[int]
) -> Iterator[tuple[VersionKey, tuple[int, ...], int]]:
    """Yield (key, gaps, size) for each version whose gaps contain a check.

    Versions with equal keys are alike. The key has the fields `born`, `gaps` and `alone` of VersionGroup, and
    the classes of latency.
    """
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
        yield key, tuple(index for _, _, index in spans), size


def _latency_class(problem: Problem, size_bytes: int) -> tuple[int, ...]:
    """Return, for each link, its latency as a part of the time that these bytes take on the link.

    The unit is 2 % of this time, and the result is at most 100 units. Only versions with equal results are in
    one group, because each byte of a group costs as much link time as in the group's cheapest transfer. So
    the true costs must be about the same.
    """
    return tuple(
        min(50 * link.latency_ns * link.bandwidth_bytes_per_s // (size_bytes * NS_PER_S), 100)
        for route in problem.routes
        for link in (route.out, route.back)
    )


def interval_lengths_ns(durations: Sequence[int], checks: Sequence[int]) -> list[int]:
    """Return, for each interval between two checks, the time of its kernels. `durations` has all kernels."""
    lengths = [sum(durations[a:b]) for a, b in pairwise(checks)]
    return [*lengths, sum(durations[checks[-1] :]) + sum(durations[: checks[0]])]


@dataclass(slots=True)
class RelaxationBuilder:
    """Rows under construction.

    The builder collects the terms for links, tiers and checks from all groups. add_limit_rows() then makes
    rows of these terms.
    """

    problem: Problem
    shared: Mapping[str, int]
    checks: tuple[int, ...]
    rows: Rows
    again: RecomputeFractions
    evicted: list[EvictedUnknowns] = field(default_factory=list)
    on_link: dict[tuple[Link, int], Terms] = field(default_factory=lambda: defaultdict(list))
    on_shared: dict[tuple[str, int], Terms] = field(default_factory=lambda: defaultdict(list))
    at_check: list[Terms] = field(default_factory=list)
    in_tier: dict[tuple[Route, int], Terms] = field(default_factory=lambda: defaultdict(list))
    # Copies that take room in a tier for the whole step.
    held: dict[Route, Terms] = field(default_factory=lambda: defaultdict(list))
    scarce: tuple[bool, ...] = ()  # by route: True if the tier cannot hold all tensors that may be evicted
    # At a check, the evicted fractions of a group, plus `more`, have at most the sum `most`.
    more: Terms = field(default_factory=list)
    most: int = 1
    # By interval: terms and numbers that add to the time of its kernels.
    more_time: dict[int, Terms] = field(default_factory=lambda: defaultdict(list))
    more_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.at_check = [[] for _ in self.checks]
        sizes = {gap.tensor: gap.size_bytes for gap in self.problem.gaps}
        self.scarce = tuple(route.capacity_bytes < sum(sizes.values()) for route in self.problem.routes)

    def share_terms_with(self, other: RelaxationBuilder) -> None:
        """Add terms to the same links, checks and tiers as the other builder, which has as many checks."""
        self.evicted, self.at_check, self.in_tier = other.evicted, other.at_check, other.in_tier
        self.on_link, self.on_shared, self.held = other.on_link, other.on_shared, other.held

    @contextmanager
    def limited(self, more: Terms, most: int) -> Iterator[None]:
        """Limit the evicted fractions of groups that are added in this context: with `more`, they have at
        most the sum `most`.
        """
        self.more, self.most = more, most
        yield
        self.more, self.most = [], 1

    def add_time(self, interval: int, ns: int) -> None:
        """Let the kernels of an interval take more time."""
        self.more_ns[interval] += ns

    def add_time_of_part(self, interval: int, part: int, ns: int) -> None:
        """Let the kernels of an interval take more time, in proportion to the unknown `part`."""
        self.more_time[interval].append((part, ns))

    def add_group(self, group: VersionGroup) -> None:
        if len(group.gaps) == 1 and group.born is not None:
            self.add_single_gap_group(group, group.born)
        else:
            self.add_multi_gap_group(group)

    def add_single_gap_group(self, group: VersionGroup, born: int) -> None:
        """Add a group whose versions each have one gap and are made by a kernel.

        In such a group, the evicted fraction grows only by writes, and falls only by reads.
        """
        first, last = group.gaps[0]
        columns = []
        for route in self.problem.routes:
            evicted = tuple(self.rows.add_unknown() for _ in range(first, last + 1))
            columns.append(evicted)
            terms: Terms = [(evicted[0], 1)]
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
                    terms = [(evicted[check + 1 - first], 1), (evicted[check - first], -1), (read, 1)]
            self._charge_link_time(route.back, last, group, [(evicted[-1], 1)])
        self._add_evicted_bytes_terms(group, 0, tuple(columns))

    def add_multi_gap_group(self, group: VersionGroup) -> None:
        """Add a group whose versions have several gaps, or are made by no kernel.

        The fraction of a version that was written once has a copy from then on. Each gap can evict at most
        this fraction, without another write. A version that no kernel makes needs no write.
        """
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
                evicted = tuple(self.rows.add_unknown() for _ in range(first, last + 1))
                columns.append(evicted)
                for check, column in enumerate(evicted, first):
                    if copy:
                        self.rows.add_row(0, None, [(copy[check], 1), (column, -1)])
                    if check < last:
                        read = self.rows.add_unknown()
                        self.rows.add_row(0, None, [(read, 1), (column, -1), (evicted[check + 1 - first], 1)])
                        self._charge_link_time(route.back, check, group, [(read, 1)])
                self._charge_link_time(route.back, last, group, [(evicted[-1], 1)])
            self._add_evicted_bytes_terms(group, index, tuple(columns))

    def _charge_link_time(self, link: Link, interval: int, group: VersionGroup, fractions: Terms) -> None:
        """Add the time that these fractions of the group's bytes take on a link to the link's terms in this
        interval.
        """
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
        """Add the evicted bytes to the terms of checks and tiers. At each check, limit the sum of the evicted
        and recomputed fractions.
        """
        first, size = group.gaps[gap][0], sum(group.sizes_bytes)
        self.evicted.append(EvictedUnknowns(group, gap, columns))
        for route, scarce, evicted in zip(self.problem.routes, self.scarce, columns, strict=True):
            hold = self.rows.add_unknown() if scarce and group.alone else -1
            if hold >= 0:
                self.held[route].append((hold, size))
            for check, column in enumerate(evicted, first):
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
            if len(parts) > 1 or self.more:
                self.rows.add_row(None, self.most, [*parts, *self.more])

    def add_limit_rows(
        self, budget_bytes: int, live_bytes: Sequence[int], lengths_ns: Sequence[int]
    ) -> tuple[tuple[Link | str, int, int], ...]:
        """Add the rows that limit all groups together: memory, links and tiers.

        `live_bytes` has the live bytes at each check, and `lengths_ns` the kernels' time of each interval.
        Return (link or shared bandwidth, interval, row) for each row that limits the time of transfers.
        """
        problem, checks = self.problem, self.checks
        lengths_ns = [length + self.more_ns.get(interval, 0) for interval, length in enumerate(lengths_ns)]
        for live, terms in zip(live_bytes, self.at_check, strict=True):
            if live - sum(min(factor, 0) for _, factor in terms) > budget_bytes:
                self.rows.add_row(live - budget_bytes, None, terms)
        timed: list[tuple[Link | str, int, int]] = []
        for (link, interval), terms in self.on_link.items():
            timed.append((link, interval, len(self.rows.low)))
            self.rows.add_row(None, lengths_ns[interval], [*_merge_terms(terms), *self._gained(interval)])
        for one, other, slower in self._slowed_link_pairs():
            for interval in range(len(checks)):
                lost = [(column, _scale_ns(ns, slower)) for column, ns in self.on_link[other, interval]]
                timed.append((f"{_link_name(one)} beside {_link_name(other)}", interval, len(self.rows.low)))
                terms = [*_merge_terms([*self.on_link[one, interval], *lost]), *self._gained(interval)]
                self.rows.add_row(None, lengths_ns[interval], terms)
        for (name, interval), terms in self.on_shared.items():
            rate = self.shared[name]
            times = [(column, size * NS_PER_S // rate) for column, size in _merge_terms(terms)]
            timed.append((name, interval, len(self.rows.low)))
            self.rows.add_row(None, lengths_ns[interval], [*times, *self._gained(interval)])
        for route, scarce in zip(problem.routes, self.scarce, strict=True):
            for check in range(len(checks)) if scarce else ():
                terms = [*self.in_tier[route, check], *self.held[route]]
                self.rows.add_row(None, route.capacity_bytes, terms)
        return tuple(timed)

    def _gained(self, interval: int) -> Terms:
        """Return terms for the time that the interval gains by its stall and by kernels from elsewhere."""
        return [(interval, -1), *((column, -ns) for column, ns in self.more_time.get(interval, ()))]

    def _slowed_link_pairs(self) -> Iterator[tuple[Link, Link, int]]:
        """Yield (link, other link, loss) for each link that is slower while the other link moves bytes.

        The loss is the time in ns that the link loses in each second in which the other link moves bytes.
        """
        sharing = list(dict.fromkeys(link for link, _ in self.on_link if link.shares is not None))
        for one, other in permutations(sharing, 2):
            if one.shares is None or one.shares != other.shares:
                continue
            alone, others = one.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s
            whole = self.shared[one.shares]
            rate = min(alone, max(-(-whole // 2), whole - others))  # highest rate while both links move
            others_rate = min(others, max(-(-whole // 2), whole - alone))
            if rate < alone:
                yield one, other, others * (alone - rate) * NS_PER_S // (others_rate * alone)


def _scale_ns(ns: int, of_second: int) -> int:
    """Return `ns` times `of_second` / 10**9, rounded towards zero."""
    return ns * of_second // NS_PER_S if ns >= 0 else -(-ns * of_second // NS_PER_S)


def _link_name(link: Link) -> str:
    return f"{link.source}>{link.target}"


def _merge_terms(terms: Terms) -> Terms:
    """Return the terms with one entry for each unknown.

    An unknown may have two terms in a row: one for each of two links, or one for each end of an interval.
    """
    sums: dict[int, int] = defaultdict(int)
    for column, factor in terms:
        sums[column] += factor
    return [(column, factor) for column, factor in sums.items() if factor]
