"""The common part of the planners of published systems. In: absences. Out: a plan, or a PlanError.

An *absence* is an idle interval (gap) of a tensor in which the tensor is evicted. The planner of each system
chooses the absences, their tiers, and the ticks of transfers by the system's published rules. It uses no
rules of our planner greedy, so that a comparison is with the published rules only. If the plan of a system
needs more than the budget, the real system would fail. In this case PlanError names the bytes beyond the
budget.
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
    """A gap in which the tensor is evicted. The eviction is issued when the gap begins, and its bytes are
    free from tick `free` on. The fetch is issued at tick `trigger`. If `writes` is False, the slow tier has a
    copy of the bytes already.
    """

    gap: int
    route: Route
    free: int
    trigger: int
    writes: bool = True

    def change_free(self, tick: int) -> None:
        """Set the tick from which the bytes count as free."""
        self.free = tick

    def change_trigger(self, tick: int) -> None:
        """Set the tick at which the fetch is issued."""
        self.trigger = tick


class TierRoom:
    """The room left in each slow tier. A tensor with a tier takes room in it for the whole step."""

    def __init__(self, problem: Problem) -> None:
        self.left = {route: route.capacity_bytes for route in problem.routes}
        self.of: dict[int, Route] = {}

    def has_room(self, gap: Gap, route: Route) -> bool:
        assigned = self.of.get(gap.tensor)
        return assigned is route if assigned else self.left[route] >= gap.size_bytes

    def assign_tier(self, gap: Gap, route: Route) -> None:
        if gap.tensor not in self.of:
            self.of[gap.tensor] = route
            self.left[route] -= gap.size_bytes


class LinkCapacity:
    """The bytes that each link can still carry during each kernel.

    If links share a bandwidth, a transfer on one link leaves fewer bytes for the others.
    """

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.durations = np.array([k.duration_ns for k in problem.profile.kernels] or [0], np.float64)
        self.shared = {name: self.durations * (rate / 1e9) for name, rate in machine.shared}
        self.own: dict[Link, Bytes] = {}

    def bytes_left_by_tick(self, link: Link) -> Bytes:
        own = self.own.setdefault(link, self.durations * (link.bandwidth_bytes_per_s / 1e9))
        return np.minimum(own, self.shared[link.shares]) if link.shares else own

    def first_tick_transfer_is_done(self, link: Link, start: int, end: int, size_bytes: int) -> int:
        """Return the first tick at which a transfer that begins at `start` is complete, or `end` if this tick
        is later.
        """
        sums = np.cumsum(_rows_between(self.bytes_left_by_tick(link), start, end))
        return min(start + int(np.searchsorted(sums, size_bytes)) + 1, end)

    def last_tick_to_start_transfer(self, link: Link, start: int, end: int, size_bytes: int) -> int:
        """Return the last tick at which a transfer may begin to be complete at `end`, or `start` if this tick
        is earlier.
        """
        sums = np.cumsum(_rows_between(self.bytes_left_by_tick(link), start, end)[::-1])
        return max(end - int(np.searchsorted(sums, size_bytes)) - 1, start)

    def commit_transfer(
        self, link: Link, start: int, end: int, size_bytes: int, *, backwards: bool = False
    ) -> None:
        """Reserve link capacity for a transfer in the ticks from `start` up to `end`.

        Reserve from `start` on. If `backwards` is True, reserve from `end` back.
        """
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
    """Evict all tensors that no kernel uses, each to the first tier with room. All other tensors are
    resident.

    Return the room left in the tiers, and the bytes on the device by tick.
    """
    tiers, ledger = TierRoom(problem), BytesByTick(problem.live)
    for gap in problem.gaps:
        route = next((r for r in problem.routes if gap.unused and tiers.has_room(gap, r)), None)
        if route is not None:
            tiers.assign_tier(gap, route)
            ledger.add_bytes_between(0, len(problem.live), -gap.size_bytes)
    return tiers, ledger


def mark_writing_absences(problem: Problem, absences: Sequence[Absence]) -> list[Absence]:
    """Return the absences, with `writes` set only if the slow tier has no copy of the bytes yet.

    If a tensor is evicted several times between two writes, only the first eviction writes. The others are
    drops. This function is for systems that track unchanged tensors. Leave out absences that end before they
    begin.
    """
    ticks, seen, useful = len(problem.live), set(), []

    def age_sort_key(absence: Absence) -> tuple[int, int]:
        return problem.gaps[absence.gap].ticks_since_write(ticks), absence.gap

    for absence in sorted(absences, key=age_sort_key):
        gap = problem.gaps[absence.gap]
        absence.writes = gap.version is not None and (gap.tensor, gap.version) not in seen
        absence.free = absence.free if absence.writes else gap.start + 1
        if absence.free < absence.trigger:
            seen.add((gap.tensor, gap.version))
            useful.append(absence)
    return useful


def plan_of_absences(
    problem: Problem, absences: Sequence[Absence], tiers: TierRoom, budget_bytes: int, name: str, fails: str
) -> Plan:
    """Return the plan that evicts and fetches at the ticks of these absences.

    Raise PlanError if more bytes than the budget would be resident. The message contains `fails`, which tells
    how the published system itself would fail.
    """
    absences = [absence for absence in absences if absence.free < absence.trigger]
    unused = [gap for gap in problem.gaps if gap.unused and gap.tensor in tiers.of]
    _, ledger = tiers_and_ledger_without_unused(problem)
    for absence in absences:
        ledger.add_bytes_between(absence.free, absence.trigger, -problem.gaps[absence.gap].size_bytes)
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
    for absence in absences:
        gap = problem.gaps[absence.gap]
        tensor, tier = tensors[gap.tensor], absence.route.tier
        out = gap.start + 1
        shift = out // ticks * ticks
        evict = Evict(tensor.name, tier, absence.free - shift, out - shift if absence.writes else None)
        issued.append((out % ticks, gap.end, absence.gap, evict))
        shift = absence.trigger // ticks * ticks
        fetch = Fetch(tensor.name, tier, absence.trigger - shift, gap.end - shift)
        issued.append((absence.trigger % ticks, gap.end, absence.gap, fetch))
        if absence.free < ticks <= gap.end:
            homes.append(Home(tensor.name, tier))
    moves = tuple(move for *_, move in sorted(issued, key=lambda row: row[:3]))
    return Plan("", name, budget_bytes, tuple(sorted(homes, key=lambda home: home.tensor)), moves)
