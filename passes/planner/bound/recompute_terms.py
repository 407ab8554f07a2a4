"""What making tensors again costs and saves, for the relaxation. In: a problem. Out: unknowns and rows.

Unknown are, for each tensor that can be made again, the fraction of it that is, and for each kernel that
several of them need, the fraction of it that runs again. A stall is then any time beyond the step's own
kernels: waiting, or a kernel that runs again. The rows hold for every plan on every step that
`profile_with_recomputation` makes:

- A tensor that is made again is not there, at most, between the uses of its cut, without any transfer.
- Its kernel runs again at least once, and so does every other of its chain whose result is dead by then.
- A kernel runs again before the first use of what is made, and not before anything that needs it is used for
  the first time after its own cut. So up to a check, the intervals have room for what must have run by then,
  and from a check on for what cannot have run before.

That tensors are made again before they are needed, because others are made from them, or that what is read
must be there, is not in the rows: the bound may be below what can be reached, never above it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from teraio.formats.recompute import KernelAccesses, RecomputeGap, find_recompute_gaps

from ..problem.problem import Problem
from .rows import Rows, Terms


@dataclass(frozen=True, slots=True)
class RecomputeOption:
    """A tensor that can be made again: the gap that this spans, the kernels that then must run again, and
    between which kernels they do."""

    tensor: int
    gap: int  # index into problem.gaps
    kernels: tuple[int, ...]
    earliest: int
    latest: int


def find_recompute_options(problem: Problem) -> tuple[RecomputeOption, ...]:
    """What could be made again, of what may move at all."""
    profile = problem.profile
    touched = KernelAccesses(profile)
    possible = find_recompute_gaps(profile, touched)
    gaps = {(gap.tensor, gap.start): index for index, gap in enumerate(problem.gaps)}
    earliest = _earliest_recompute_ticks(problem, touched, possible)
    dies = [max((*t.reads, *t.writes), default=-1) for t in profile.tensors]
    found = []
    for index, cut in possible.items():
        gap = gaps.get((index, cut.last))
        if gap is None:
            continue
        chain = set(profile.tensors[index].recompute_from)
        # Kernels that make no tensor of the profile run with it always.
        open_, needed = [cut.made, *(tick for tick in chain if not touched.writes[tick])], set[int]()
        while open_:
            tick = open_.pop()
            needed.add(tick)
            for source in touched.reads[tick]:
                tensor = profile.tensors[source]
                short = not tensor.persistent and tensor.kind != "input"
                if short and dies[source] <= cut.last and {*tensor.writes} <= chain - needed:
                    open_.append(tensor.writes[0])
        found.append(RecomputeOption(index, gap, tuple(sorted(needed)), earliest[index], cut.first))
    return tuple(found)


def _earliest_recompute_ticks(
    problem: Problem, touched: KernelAccesses, possible: dict[int, RecomputeGap]
) -> dict[int, int]:
    """For each tensor, the first use after a cut of it, or of anything that is made from it or with it."""
    tensors = problem.profile.tensors
    users: dict[int, set[int]] = defaultdict(set)
    for index in possible:
        for tick in tensors[index].recompute_from:
            for source in (*touched.reads[tick], *touched.writes[tick]):
                if source in possible and source != index:
                    users[source].add(index)
    found = {index: cut.first for index, cut in possible.items()}
    for _ in range(2):  # siblings are users of each other: once more than the order of the step needs
        for index in sorted(possible, key=lambda index: -possible[index].made):
            found[index] = min([found[index], *(found[user] for user in users[index])])
    return found


@dataclass(frozen=True, slots=True)
class _RecomputedKernel:
    """A kernel that runs again: the unknown, its time, and in which intervals it does."""

    column: int
    duration_ns: int
    first: int
    last: int


class RecomputeFractions:
    """The unknowns of one relaxation, and their rows."""

    def __init__(self, problem: Problem, candidates: Sequence[RecomputeOption], rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.of_gap = {each.gap: each for each in candidates}
        self.columns: dict[int, int] = {}  # tensor -> unknown

    def add_unknown_for_gaps(self, gaps: Sequence[int], sizes_bytes: Sequence[int]) -> int:
        """The fraction of these tensors together, weighted by size, that is made again; -1: none can be."""
        if not any(gap in self.of_gap for gap in gaps):
            return -1
        together = self.rows.add_unknown()
        terms: Terms = [(together, sum(sizes_bytes))]
        for gap, size in zip(gaps, sizes_bytes, strict=True):
            each = self.of_gap.get(gap)
            if each is not None:
                column = self.columns.setdefault(each.tensor, -1)
                if column < 0:
                    column = self.columns[each.tensor] = self.rows.add_unknown()
                terms.append((column, -size))
        self.rows.add_row(None, 0, terms)
        return together

    def add_recompute_time_rows(self, checks: Sequence[int]) -> None:
        """The rows about time."""
        users: dict[int, list[RecomputeOption]] = defaultdict(list)
        for each in self.of_gap.values():
            if each.tensor in self.columns:
                for kernel in each.kernels:
                    users[kernel].append(each)
        kernels = self.problem.profile.kernels
        calls: dict[int, list[_RecomputedKernel]] = defaultdict(list)
        for kernel, those in users.items():
            column = self.columns[those[0].tensor]
            if len(those) > 1:
                column = self.rows.add_unknown()
                for each in those:
                    self.rows.add_row(0, None, [(column, 1), (self.columns[each.tensor], -1)])
            first = bisect_left(checks, min(each.earliest for each in those)) - 1
            latest = max(each.latest for each in those)
            last = bisect_left(checks, latest) - 1
            calls[kernels[latest].call].append(
                _RecomputedKernel(column, kernels[kernel].duration_ns, first, last)
            )
        for costs in calls.values():
            begin, end = min(cost.first for cost in costs), max(cost.last for cost in costs)
            for interval in range(begin, end + 1):
                self._require_stalls_cover_recompute(
                    begin, interval, [cost for cost in costs if cost.last <= interval]
                )
                self._require_stalls_cover_recompute(
                    interval, end, [cost for cost in costs if cost.first >= interval]
                )

    def _require_stalls_cover_recompute(
        self, first: int, last: int, costs: Sequence[_RecomputedKernel]
    ) -> None:
        """In these intervals there is time for that; the interval before the first check is the last one."""
        stalls = sorted({interval % self.rows.stalls for interval in range(first, last + 1)})
        sums: dict[int, int] = defaultdict(int)
        for cost in costs:
            sums[cost.column] -= cost.duration_ns
        if sums:
            self.rows.add_row(0, None, [*((stall, 1) for stall in stalls), *sums.items()])
