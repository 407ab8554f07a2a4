"""The costs and savings of recomputation in the relaxation. In: a problem. Out: unknowns and rows.

Each tensor that can be recomputed has one unknown: the fraction of the tensor that is recomputed. If several
of these tensors need the same kernel, this kernel also has an unknown: the fraction of it that runs again. In
this relaxation a *stall* is a wait, or a kernel that runs again.

The *cut* of a recomputed tensor is the point in the step where the original bytes are freed. The *chain* of a
tensor is the list of kernels that recompute it. The rows hold for every plan on every step that
`profile_with_recomputation` makes:

- At best, a recomputed tensor takes no memory from its last use before the cut to its first use after the
  cut. No transfer is necessary.
- The kernel that makes the tensor runs again. A kernel of the chain also runs again if its result no longer
  exists at the cut.
- A kernel runs again before the first use of its recomputed result. At the earliest, it runs directly before
  a tensor that depends on the result is first used after the tensor's cut. So the stalls up to a check kernel
  must cover the kernels that must have run before this check. The stalls from a check kernel on must cover
  the kernels that cannot have run before this check.

The rows leave out two costs. (1) A tensor may be recomputed long before its use, because another tensor is
recomputed from it. (2) The tensors that a recomputed kernel reads must be resident. So the bound may be too
low, but it is never too high.
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
    """A tensor that can be recomputed. `gap` is the idle interval in which the tensor takes no memory.
    `kernels` must run again, between the ticks `earliest` and `latest`.
    """

    tensor: int
    gap: int  # index into problem.gaps
    kernels: tuple[int, ...]
    earliest: int
    latest: int


def find_recompute_options(problem: Problem) -> tuple[RecomputeOption, ...]:
    """Return an option for each tensor that can be recomputed and that can be evicted."""
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
        # Some kernels of the chain write no tensor of the profile. They always run again.
        pending, needed = [cut.made, *(tick for tick in chain if not touched.writes[tick])], set[int]()
        while pending:
            tick = pending.pop()
            needed.add(tick)
            for source in touched.reads[tick]:
                tensor = profile.tensors[source]
                short = not tensor.outlives_step and tensor.kind != "input"
                if short and dies[source] <= cut.last and {*tensor.writes} <= chain - needed:
                    pending.append(tensor.writes[0])
        found.append(RecomputeOption(index, gap, tuple(sorted(needed)), earliest[index], cut.first))
    return tuple(found)


def _earliest_recompute_ticks(
    problem: Problem, touched: KernelAccesses, possible: dict[int, RecomputeGap]
) -> dict[int, int]:
    """Return, for each tensor, the earliest tick before which it may be recomputed.

    This is the first use after its cut: a use of the tensor itself, or of a tensor that is recomputed from
    it.
    """
    tensors = problem.profile.tensors
    users: dict[int, set[int]] = defaultdict(set)
    for index in possible:
        for tick in tensors[index].recompute_from:
            for source in (*touched.reads[tick], *touched.writes[tick]):
                if source in possible and source != index:
                    users[source].add(index)
    found = {index: cut.first for index, cut in possible.items()}
    # The first pass goes backwards through the step. Tensors that one kernel makes depend on each other, so
    # they need a second pass.
    for _ in range(2):
        for index in sorted(possible, key=lambda index: -possible[index].made):
            found[index] = min([found[index], *(found[user] for user in users[index])])
    return found


@dataclass(frozen=True, slots=True)
class _RecomputedKernel:
    """A kernel that runs again. `column` is its unknown. It may run in the intervals `first` to `last`
    between check kernels.
    """

    column: int
    duration_ns: int
    first: int
    last: int


class RecomputeFractions:
    """The unknowns of one relaxation for recomputed tensors and kernels, and their rows."""

    def __init__(self, problem: Problem, candidates: Sequence[RecomputeOption], rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.of_gap = {each.gap: each for each in candidates}
        self.columns: dict[int, int] = {}  # tensor -> unknown

    def add_unknown_for_gaps(self, gaps: Sequence[int], sizes_bytes: Sequence[int]) -> int:
        """Return one unknown for all these gaps together: the fraction of their tensors' bytes that is
        recomputed.

        Return -1 if none of the tensors can be recomputed.
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
        """Add the rows which require that stalls are at least as long as the kernels that run again."""
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
        """Require that the stalls of the intervals `first` to `last` are at least as long as the kernels in
        `costs`.

        The step repeats, so interval -1, before the first check, is the last interval.
        """
        stalls = sorted({interval % self.rows.stalls for interval in range(first, last + 1)})
        sums: dict[int, int] = defaultdict(int)
        for cost in costs:
            sums[cost.column] -= cost.duration_ns
        if sums:
            self.rows.add_row(0, None, [*((stall, 1) for stall in stalls), *sums.items()])
