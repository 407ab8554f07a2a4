"""Which gaps are spent away, and where. In: a problem and a ladder of targets. Out: one choice per target.

As long as the ledger is above the target somewhere, take the gap with the best ratio of benefit to cost:

    benefit   its bytes x the time for which the ledger is above the target within the gap; with `sparing`,
              only those of its bytes count that are above the target
    cost      the time its transfers occupy the links; a version that is written already costs no second write

A lower target means that more is away than memory asks for; what is gained is room for transfers in flight.
Targets go down, and each choice goes on from the one before, so that the whole ladder costs little more than
its last rung. Every gap of positive benefit can be taken, so a target at or above the floor is always met
unless a tier is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from teraio.errors import PlanError

from ..problem.problem import Bytes, BytesByTick, Problem, Route, transfer_ns

CLASS_TICKS = 50_000  # sizes x ticks: with 12 sizes and 1,500 ticks a choice takes as long as with one size


@dataclass(frozen=True, slots=True)
class GapChoice:
    """Indices into `problem.gaps`, and the tier of each tensor that moves."""

    target_bytes: int
    gaps: tuple[int, ...]
    routes: dict[int, Route]


class _TierAssignment:
    """Where tensors go: where the problem says, else on the route on which they are done first; each to a
    tier with room."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rows = {route: BytesByTick(np.zeros(len(problem.live), np.int64)) for route in problem.routes}
        self.load_ns = dict.fromkeys(problem.routes, 0)
        self.of: dict[int, Route] = {}

    def try_assign_tier(self, gap: int) -> bool:
        """Give the gap's tensor a tier if it has none; False if no tier has room for it."""
        tensor, size = self.problem.gaps[gap].tensor, self.problem.gaps[gap].size_bytes
        if tensor in self.of:
            self.load_ns[self.of[tensor]] += transfer_ns(self.of[tensor].back, size)
            return True
        first, end = lifetime(self.problem, tensor)
        roomy = [
            route
            for route, rows in self.rows.items()
            if int(rows.rows_between(first, end).max()) + size <= route.capacity_bytes
        ]
        if not roomy:
            return False
        best = min(roomy, key=lambda r: self.load_ns[r] + transfer_ns(r.back, size))  # ties: the fastest
        towards = self.problem.towards[tensor] if self.problem.towards else -1
        if towards >= 0 and self.problem.routes[towards] in roomy:
            best = self.problem.routes[towards]
        self.rows[best].add_bytes_between(first, end, size)
        self.load_ns[best] += transfer_ns(best.back, size)
        self.of[tensor] = best
        return True


def lifetime(problem: Problem, tensor: int) -> tuple[int, int]:
    """Ticks for which a copy may be held; a persistent tensor keeps its place all step long."""
    it = problem.profile.tensors[tensor]
    uses = (*it.reads, *it.writes)
    return (0, len(problem.live)) if it.persistent else (min(uses), max(uses) + 1)


def choose_gaps(
    problem: Problem, targets: Sequence[int], windows: Sequence[tuple[int, int]], sparing: bool = False
) -> Iterator[GapChoice]:
    """One choice per target, which go down. Ends early when no gap that is left helps.

    `windows`: for each gap, from which tick up to which its bytes count as away, within its widest absence.
    """
    gaps, ticks = problem.gaps, len(problem.live)
    slots_ns = np.array([kernel.duration_ns + 1 for kernel in problem.profile.kernels] or [1], np.float64)
    size = np.array([gap.size_bytes for gap in gaps], np.int64)
    first = np.array([window[0] for window in windows], np.int64)
    end = np.array([window[1] for window in windows], np.int64)
    versions = [(gap.tensor, gap.version) for gap in gaps]
    siblings: dict[tuple[int, int | None], list[int]] = {}
    for index, version in enumerate(versions):
        siblings.setdefault(version, []).append(index)
    cost = np.array([_round_trip_ns(problem, index) for index in range(len(gaps))], np.float64)
    classes, caps = _size_classes(size, ticks) if sparing else (np.zeros(len(gaps), np.int64), np.ones(1))
    alive = np.ones(len(gaps), bool)
    ledger, tiers, taken = BytesByTick(problem.live), _TierAssignment(problem), []
    for target in targets:
        while (above := np.maximum(ledger.rows - target, 0)).any():
            area = np.zeros((len(caps), ticks + 1), np.float64)
            most = np.minimum(above, caps[:, None]) if sparing else np.minimum(above, 1)[None]
            np.cumsum(most * slots_ns, axis=1, out=area[:, 1:])
            inside = (end // ticks - first // ticks) * area[classes, -1]
            inside += area[classes, end % ticks] - area[classes, first % ticks]
            score = np.where(alive, inside * (1 if sparing else size) / cost, 0.0)
            best = int(score.argmax()) if len(score) else -1
            if best < 0 or score[best] <= 0:
                return
            alive[best] = False
            if not tiers.try_assign_tier(best):
                continue
            taken.append(best)
            ledger.add_bytes_between(int(first[best]), int(end[best]), -int(size[best]))
            for other in siblings[versions[best]]:
                cost[other] = max(transfer_ns(tiers.of[gaps[best].tensor].back, int(size[best])), 1)
        needed = _prune_superfluous_gaps(taken, windows, size, cost, ledger, target)
        yield GapChoice(target, tuple(needed), dict(tiers.of))


def _size_classes(size: Bytes, ticks: int) -> tuple[Bytes, Bytes]:
    """For each gap its class, and for each class its size: few enough to look at all of them each time."""
    caps, classes = np.unique(size, return_inverse=True)
    most = max(CLASS_TICKS // ticks, 4)
    if len(caps) <= most:
        return classes, caps
    # Of several sizes the largest counts.
    part = np.arange(len(caps)) * most // len(caps)
    last = np.flatnonzero(np.diff(part, append=most))
    return part[classes], caps[last]


def _prune_superfluous_gaps(
    taken: list[int],
    windows: Sequence[tuple[int, int]],
    size: Bytes,
    cost: Bytes,
    ledger: BytesByTick,
    target: int,
) -> list[int]:
    """Without the gaps that later ones made superfluous; the most expensive are let off first."""
    room, kept = BytesByTick(ledger.rows), []
    for index in sorted(taken, key=lambda i: (-cost[i], i)):
        first, end = windows[index]
        if int(room.rows_between(first, end).max()) + int(size[index]) <= target:
            room.add_bytes_between(first, end, int(size[index]))
        else:
            kept.append(index)
    return sorted(kept)


def _round_trip_ns(problem: Problem, index: int) -> int:
    """What a gap's transfers take on the fastest route; never 0, so that it can divide."""
    gap = problem.gaps[index]
    if gap.unused or not problem.routes:
        return 1
    route = problem.routes[0]
    write_ns = 0 if gap.version is None else transfer_ns(route.out, gap.size_bytes)
    return max(transfer_ns(route.back, gap.size_bytes) + write_ns, 1)


def no_tier_room_error(problem: Problem, budget_bytes: int) -> PlanError:
    """The certificate when memory would do, but the slow tiers do not."""
    tick = int(problem.live.argmax())
    kernels = problem.profile.kernels
    name = kernels[tick].name if kernels else "(no kernels)"
    tiers = ", ".join(f"{r.tier!r} {r.capacity_bytes} bytes" for r in problem.routes)
    return PlanError(
        f"{int(problem.live[tick]) - budget_bytes} bytes must be away at kernel {name!r} (tick {tick}), and"
        f" the slow tiers lack room ({tiers or 'there is none with links both ways'}). Give a larger tier, or"
        f" up to {int(problem.live[tick])} bytes of budget"
    )
