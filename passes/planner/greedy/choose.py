"""The choice of the gaps (idle intervals of tensors) in which tensors are evicted, and of the tensors' tiers.

In: a problem, and targets in falling order. Out: one choice for each target. A *target* is a number of bytes.
The *ledger* is the number of bytes on the device at each tick, and must not exceed the target.

While the ledger is above the target at some tick, take the gap with the highest ratio of benefit to cost:

    benefit   the gap's bytes x the time in the gap for which the ledger is above the target; with `sparing`,
              only the gap's bytes above the target count
    cost      the time for which the gap's transfers occupy the links. If an earlier gap with the same bytes
              was taken, the cost has no write

With a target below the budget, more bytes are evicted than necessary. This leaves room for transfers in
flight. Each choice continues from the choice before, because targets fall. So all choices together take
little longer than the choice for the lowest target alone.

The *floor* is the least memory in which all kernels can run. If all gaps are taken, the ledger is at the
floor. So a target at or above the floor is always met, unless a tier is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from teraio.errors import PlanError
from teraio.units import fmt_bytes

from ..problem.problem import Bytes, BytesByTick, Problem, Route, transfer_ns

CLASS_TICKS = 50_000  # limit for size classes x ticks; 12 classes with 1,500 ticks took no longer than one


@dataclass(frozen=True, slots=True)
class GapChoice:
    """The gaps in which tensors are evicted, as indices into `problem.gaps`, and the route (slow tier and
    links) of each of these tensors.
    """

    target_bytes: int
    gaps: tuple[int, ...]
    routes: dict[int, Route]


class _TierAssignment:
    """The tier of each tensor.

    A tensor gets the tier of its hint (`problem.towards`), if this tier has room. Otherwise it gets a tier
    with room: the one whose link needs the least time for all fetches assigned to it so far, plus this
    tensor's fetch.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rows = {route: BytesByTick(np.zeros(len(problem.live), np.int64)) for route in problem.routes}
        self.load_ns = dict.fromkeys(problem.routes, 0)
        self.of: dict[int, Route] = {}

    def try_assign_tier(self, gap: int) -> bool:
        """Assign a tier to the gap's tensor, if it has no tier yet. Return False if no tier has room."""
        tensor, size = self.problem.gaps[gap].tensor, self.problem.gaps[gap].size_bytes
        if tensor in self.of:
            self.load_ns[self.of[tensor]] += transfer_ns(self.of[tensor].back, size)
            return True
        first, end = self.problem.profile.tensors[tensor].life(len(self.problem.live))
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


def choose_gaps(
    problem: Problem, targets: Sequence[int], windows: Sequence[tuple[int, int]], sparing: bool = False
) -> Iterator[GapChoice]:
    """Yield a choice of gaps for each target. A target is a number of bytes: with the tensors of the chosen
    gaps evicted, at most this number is resident at each tick.

    Targets must be in falling order. End early if no choice meets a target. `windows` has, for each gap, the
    ticks [first, end) in which its bytes count as evicted.
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
    """Group the gaps by size. Return the class of each gap, and the size of each class.

    The number of classes is limited, because the choice of each gap computes a row of numbers for every
    class.
    """
    caps, classes = np.unique(size, return_inverse=True)
    most = max(CLASS_TICKS // ticks, 4)
    if len(caps) <= most:
        return classes, caps
    # If a class has several sizes, the largest size is the size of the class.
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
    """Return the taken gaps that are necessary for the target. Leave out each gap without which the target is
    still met.

    Try to leave out the most expensive gaps first.
    """
    room, kept = BytesByTick(ledger.rows), []
    for index in sorted(taken, key=lambda i: (-cost[i], i)):
        first, end = windows[index]
        if int(room.rows_between(first, end).max()) + int(size[index]) <= target:
            room.add_bytes_between(first, end, int(size[index]))
        else:
            kept.append(index)
    return sorted(kept)


def _round_trip_ns(problem: Problem, index: int) -> int:
    """Return the time of a gap's write and read on the fastest route, at least 1.

    The score of a gap has this time as its divisor.
    """
    gap = problem.gaps[index]
    if gap.unused or not problem.routes:
        return 1
    route = problem.routes[0]
    write_ns = 0 if gap.version is None else transfer_ns(route.out, gap.size_bytes)
    return max(transfer_ns(route.back, gap.size_bytes) + write_ns, 1)


def no_tier_room_error(problem: Problem, budget_bytes: int) -> PlanError:
    """Return the error for a budget that every kernel fits into, if the slow tiers are too small for the
    evicted tensors.
    """
    tick = int(problem.live.argmax())
    kernels = problem.profile.kernels
    name = kernels[tick].name if kernels else "(no kernels)"
    tiers = ", ".join(f"{r.tier!r} {fmt_bytes(r.capacity_bytes)}" for r in problem.routes)
    live_bytes = int(problem.live[tick])
    return PlanError(
        f"{fmt_bytes(live_bytes - budget_bytes)} must be evicted at kernel {name!r} (tick {tick}), and the "
        f"slow tiers lack room ({tiers or 'no tier has links in both directions'}). Give a larger tier, or "
        f"up to {fmt_bytes(live_bytes, up=True)} of budget"
    )
