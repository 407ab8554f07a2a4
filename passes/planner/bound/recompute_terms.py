"""The costs and savings of recomputation in the relaxation. In: a problem. Out: unknowns and rows.

Each tensor that can be recomputed has one unknown: the fraction of the tensor that is recomputed. Each kernel
that several of these tensors need has an unknown as well: the fraction of the kernel that runs again. In this
relaxation a stall is any time beyond the step's own kernels: a wait, or a kernel that runs again. The rows
hold for every plan on every step that `profile_with_recomputation` makes:

- At best, a recomputed tensor takes no memory after its last use before the cut. It takes memory again at its
  first use after the cut. This saving needs no transfer.
- The kernel of the tensor runs again one time or more. Every other kernel of the tensor's chain whose result
  is dead at the cut also runs again one time or more.
- A kernel runs again before the first use of its recomputed result. The earliest moment is directly before
  the first use, after its cut, of a tensor that depends on the result. The intervals up to a check therefore
  have room for the kernels that must have run before the check. The intervals from a check on have room for
  the kernels that cannot have run before the check.

The rows leave out two costs. (1) A tensor may be recomputed long before its use, because another tensor is
recomputed from it. (2) The tensors that a recomputed kernel reads must be resident. The bound may therefore
be below every possible step, but it is never above a possible step.
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
    """A tensor that can be recomputed: its gap, the kernels that must run again, and the ticks between which
    these kernels run."""

    tensor: int
    gap: int  # index into problem.gaps
    kernels: tuple[int, ...]
    earliest: int
    latest: int


def find_recompute_options(problem: Problem) -> tuple[RecomputeOption, ...]:
    """Return the movable tensors that can be recomputed."""
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
        # Kernels of the chain that write no tensor of the profile always run again with the chain.
        pending, needed = [cut.made, *(tick for tick in chain if not touched.writes[tick])], set[int]()
        while pending:
            tick = pending.pop()
            needed.add(tick)
            for source in touched.reads[tick]:
                tensor = profile.tensors[source]
                short = not tensor.persistent and tensor.kind != "input"
                if short and dies[source] <= cut.last and {*tensor.writes} <= chain - needed:
                    pending.append(tensor.writes[0])
        found.append(RecomputeOption(index, gap, tuple(sorted(needed)), earliest[index], cut.first))
    return tuple(found)


def _earliest_recompute_ticks(
    problem: Problem, touched: KernelAccesses, possible: dict[int, RecomputeGap]
) -> dict[int, int]:
    """Return, for each tensor, the tick of the earliest use after the tensor's cut.

    The use is a use of the tensor itself, or a use of a tensor that depends on it.
    """
    tensors = problem.profile.tensors
    users: dict[int, set[int]] = defaultdict(set)
    for index in possible:
        for tick in tensors[index].recompute_from:
            for source in (*touched.reads[tick], *touched.writes[tick]):
                if source in possible and source != index:
                    users[source].add(index)
    found = {index: cut.first for index, cut in possible.items()}
    # The first pass follows the order of the step. Siblings depend on each other, so they need a second pass.
    for _ in range(2):
        for index in sorted(possible, key=lambda index: -possible[index].made):
            found[index] = min([found[index], *(found[user] for user in users[index])])
    return found


@dataclass(frozen=True, slots=True)
class _RecomputedKernel:
    """A kernel that runs again: its unknown, its duration, and the intervals in which the kernel may run."""

    column: int
    duration_ns: int
    first: int
    last: int


class RecomputeFractions:
    """The unknowns for recomputation in one relaxation, and their rows."""

    def __init__(self, problem: Problem, candidates: Sequence[RecomputeOption], rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.of_gap = {each.gap: each for each in candidates}
        self.columns: dict[int, int] = {}  # tensor -> unknown

    def add_unknown_for_gaps(self, gaps: Sequence[int], sizes_bytes: Sequence[int]) -> int:
        """Return one unknown for all these gaps: the fraction of their bytes that is recomputed.

        Return -1 if none of these tensors can be recomputed.
        """
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
        """Add the rows that charge the time of recomputed kernels to stalls."""
        users: dict[int, list[RecomputeOption]] = defaultdict(list)
        for each in self.of_gap.values():
            if each.tensor in self.columns:
                for kernel in each.kernels:
                    users[kernel].append(each)
        kernels = self.problem.profile.kernels
        calls: dict[int, list[_RecomputedKernel]] = defaultdict(list)
        for kernel, options in users.items():
            column = self.columns[options[0].tensor]
            if len(options) > 1:
                column = self.rows.add_unknown()
                for each in options:
                    self.rows.add_row(0, None, [(column, 1), (self.columns[each.tensor], -1)])
            first = bisect_left(checks, min(each.earliest for each in options)) - 1
            latest = max(each.latest for each in options)
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
        """Require that the stalls of the intervals `first` to `last` cover the costs.

        Interval -1, before the first check, is the same as the last interval.
        """
        stalls = sorted({interval % self.rows.stalls for interval in range(first, last + 1)})
        sums: dict[int, int] = defaultdict(int)
        for cost in costs:
            sums[cost.column] -= cost.duration_ns
        if sums:
            self.rows.add_row(0, None, [*((stall, 1) for stall in stalls), *sums.items()])
