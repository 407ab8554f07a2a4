"""What the planners of published systems have in common: absences in, a plan out; links as bins of bytes.

Each system decides which gaps are spent away, where, and when transfers begin. It does not get the timing,
write elision or portfolio of ours, so that the comparison is with what was published. Where one ends above
its budget, the plan is refused with the bytes, as the system would fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from teraio.errors import PlanError
from teraio.formats.machine import Link, Machine
from teraio.formats.plan import Evict, Fetch, Home, Move, Plan

from ..problem.problem import Bytes, BytesByTick, Gap, Problem, Route


@dataclass(slots=True)
class Absence:
    """A gap spent in a slow tier. Its eviction is issued when the gap begins; its bytes are gone from `free`
    on; its fetch is issued at `trigger`. Without `writes` a good copy is there already."""

    gap: int
    route: Route
    free: int
    trigger: int
    writes: bool = True


class TierRoom:
    """How full the slow tiers are. A tensor keeps its place for the whole step."""

    def __init__(self, problem: Problem) -> None:
        self.left = {route: route.capacity_bytes for route in problem.routes}
        self.of: dict[int, Route] = {}

    def has_room(self, gap: Gap, route: Route) -> bool:
        there = self.of.get(gap.tensor)
        return there is route if there else self.left[route] >= gap.size_bytes

    def assign_tier(self, gap: Gap, route: Route) -> None:
        if gap.tensor not in self.of:
            self.of[gap.tensor] = route
            self.left[route] -= gap.size_bytes


class LinkCapacity:
    """Bytes that a link can still carry while each kernel runs. Links that share a bandwidth do so here."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.durations = np.array([k.duration_ns for k in problem.profile.kernels] or [0], np.float64)
        self.shared = {name: self.durations * (rate / 1e9) for name, rate in machine.shared}
        self.own: dict[Link, Bytes] = {}

    def bytes_left_by_tick(self, link: Link) -> Bytes:
        own = self.own.setdefault(link, self.durations * (link.bandwidth_bytes_per_s / 1e9))
        return np.minimum(own, self.shared[link.shares]) if link.shares else own

    def first_tick_transfer_is_done(self, link: Link, start: int, end: int, size_bytes: int) -> int:
        """The first tick by which a transfer that begins at `start` is done; `end` if it is not before."""
        sums = np.cumsum(_rows_between(self.bytes_left_by_tick(link), start, end))
        return min(start + int(np.searchsorted(sums, size_bytes)) + 1, end)

    def last_tick_to_start_transfer(self, link: Link, start: int, end: int, size_bytes: int) -> int:
        """The last tick at which a transfer may begin to be done by `end`; `start` if none is after it."""
        sums = np.cumsum(_rows_between(self.bytes_left_by_tick(link), start, end)[::-1])
        return max(end - int(np.searchsorted(sums, size_bytes)) - 1, start)

    def commit_transfer(
        self, link: Link, start: int, end: int, size_bytes: int, *, backwards: bool = False
    ) -> None:
        """Carry a transfer in this window, from its beginning or, backwards, from its end."""
        ticks = np.arange(start, end) % len(self.durations)
        ticks = ticks[::-1] if backwards else ticks
        left = self.bytes_left_by_tick(link)[ticks]
        taken = np.clip(size_bytes - (np.cumsum(left) - left), 0, left)
        self.own[link][ticks] -= taken
        if link.shares:
            self.shared[link.shares][ticks] -= taken


def _rows_between(rows: Bytes, start: int, end: int) -> Bytes:
    ticks = len(rows)
    start, end = start % ticks, start % ticks + end - start
    return rows[start:end] if end <= ticks else np.concatenate((rows[start:], rows[: end - ticks]))


def tiers_and_ledger_without_unused(problem: Problem) -> tuple[TierRoom, BytesByTick]:
    """Tensors that no kernel uses are put away, each on the first tier with room; all else is there."""
    tiers, ledger = TierRoom(problem), BytesByTick(problem.live)
    for gap in problem.gaps:
        route = next((r for r in problem.routes if gap.unused and tiers.has_room(gap, r)), None)
        if route is not None:
            tiers.assign_tier(gap, route)
            ledger.add_bytes_between(0, len(problem.live), -gap.size_bytes)
    return tiers, ledger


def mark_writing_absences(problem: Problem, aways: Sequence[Absence]) -> list[Absence]:
    """The first absence of a version writes it, the others find its copy good: for systems that know which
    tensors are unchanged. Absences of no time are left out."""
    ticks, seen, useful = len(problem.live), set(), []

    def age_sort_key(away: Absence) -> tuple[int, int]:
        return problem.gaps[away.gap].ticks_since_write(ticks), away.gap

    for away in sorted(aways, key=age_sort_key):
        gap = problem.gaps[away.gap]
        away.writes = gap.version is not None and (gap.tensor, gap.version) not in seen
        away.free = away.free if away.writes else gap.start + 1
        if away.free < away.trigger:
            seen.add((gap.tensor, gap.version))
            useful.append(away)
    return useful


def plan_of_absences(
    problem: Problem, aways: Sequence[Absence], tiers: TierRoom, budget_bytes: int, name: str, fails: str
) -> Plan:
    """The plan of these absences, unless they leave more than the budget on the device: then PlanError with
    the bytes, and with what this means for the system (`fails`)."""
    aways = [away for away in aways if away.free < away.trigger]
    unused = [gap for gap in problem.gaps if gap.unused and gap.tensor in tiers.of]
    _, ledger = tiers_and_ledger_without_unused(problem)
    for away in aways:
        ledger.add_bytes_between(away.free, away.trigger, -problem.gaps[away.gap].size_bytes)
    tick = int(ledger.rows.argmax())
    over = int(ledger.rows[tick]) - budget_bytes
    if over > 0:
        kernels = problem.profile.kernels
        raise PlanError(
            f"{name} ends {over} bytes above its budget of {budget_bytes} at kernel "
            f"{kernels[tick].name if kernels else '(no kernels)'!r} (tick {tick}): {fails}. Give more "
            f"memory, or take another planner"
        )
    tensors, ticks = problem.profile.tensors, len(problem.live)
    homes = [Home(tensors[gap.tensor].name, tiers.of[gap.tensor].tier) for gap in unused]
    issued: list[tuple[int, int, int, Move]] = []
    for away in aways:
        gap = problem.gaps[away.gap]
        tensor, tier = tensors[gap.tensor], away.route.tier
        out = gap.start + 1
        shift = out // ticks * ticks
        evict = Evict(tensor.name, tier, away.free - shift, out - shift if away.writes else None)
        issued.append((out % ticks, gap.end, away.gap, evict))
        shift = away.trigger // ticks * ticks
        fetch = Fetch(tensor.name, tier, away.trigger - shift, gap.end - shift)
        issued.append((away.trigger % ticks, gap.end, away.gap, fetch))
        if tensor.persistent and away.free < ticks <= gap.end:
            homes.append(Home(tensor.name, tier))
    moves = tuple(move for *_, move in sorted(issued, key=lambda row: row[:3]))
    return Plan("", name, budget_bytes, tuple(sorted(homes, key=lambda home: home.tensor)), moves)
