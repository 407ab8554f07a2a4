"""Windows of a plan, in which the ticks of moves may change. In: a simulated plan. Out: the movable gaps of
each window.

A *window* is a range of ticks (kernels) within the step. A *gap* is an idle interval of a tensor, and an
*absence* is a gap in which the plan evicts the tensor. From tick `free` on, the evicted bytes are free. At
tick `trigger` the fetch is issued. A gap is part of the window if one of its transfers is issued at a tick of
the window, or if a tick of the window waits for one. Its `free` and `trigger` may change only within the
window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Fetch, Move, Plan

from ..greedy.timing import Absence, Clock
from ..problem.problem import BytesByTick, Problem, Route
from ..simulate.simulate import TransferTimes, last_step_times

WIDTHS = (24, 8, 48, 96)  # widths of windows in ticks, tried in this order
MOST_FREE = 60  # most gaps in a window; with 100 gaps the solver took 2 to 10 s and found nothing
MOST_NEW = 10  # most gaps in a window in which the plan does not evict the tensor yet


@dataclass(frozen=True, slots=True)
class MovableGap:
    """A gap that may change in the window. `index` is its index in `problem.gaps`.

    frees, triggers    ticks to choose from, in rising order. Ticks of the next step have larger numbers
    must               True if the tensor is evicted in every solution
    writes             True if the eviction writes a copy, False if a copy exists. None if this depends on the
                       other gaps with the same bytes

    Windows within a step also have these times:

    written_ns, read_ns              time from the window's start to the end of a write or read issued before
    write_late_ns, read_late_ns      time from the window's end to the tick that waits for a write or read
    """

    index: int
    frees: tuple[int, ...]
    triggers: tuple[int, ...]
    routes: tuple[Route, ...]
    must: bool = False
    writes: bool | None = None
    written_ns: int = 0
    read_ns: int = 0
    write_late_ns: int = 0
    read_late_ns: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """A range of ticks from `first` up to `end`, the gaps that may change in it (`free`), and limits for a
    solution.

    around        True if the window is the whole step, False if it is a part of the step
    need_bytes    by tick: the bytes that the gaps in `free` must evict
    below_ns      a solution must take less than this time
    busy_ns       by lane: how long transfers issued before the window still use the lane
    late_ns       by lane: how long after the window the lane may serve transfers of the window
    room_bytes    by route: the room in the route's tier for tensors of the gaps in `free`

    A lane is (route, True for evictions).
    """

    around: bool
    first: int
    end: int
    free: tuple[MovableGap, ...]
    need_bytes: tuple[int, ...]
    below_ns: int
    busy_ns: dict[tuple[Route, bool], int] = field(default_factory=dict)
    late_ns: dict[tuple[Route, bool], int] = field(default_factory=dict)
    room_bytes: dict[Route, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GapSolution:
    """The solution for a gap: route and ticks. `route` is None if the tensor is kept resident."""

    index: int
    route: Route | None
    free: int
    trigger: int


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """A plan and the result of its simulation.

    `absences` are the gaps in which the plan evicts a tensor. `clock` has the time at which each tick begins.
    `writes` and `reads` have the times of the transfers, by gap. `evicted` has the number of evicted gaps by
    version (the contents of a tensor between two writes). `runs` has, by lane, the issue tick and the times
    of each transfer. A lane is (route, True for evictions).
    """

    problem: Problem
    plan: Plan
    absences: tuple[Absence, ...]
    clock: Clock
    writes: dict[int, TransferTimes]
    reads: dict[int, TransferTimes]
    stalls_ns: dict[int, int]  # by tick: the wait before the kernel
    evicted: dict[tuple[int, int | None], int]
    runs: dict[tuple[Route, bool], list[tuple[int, TransferTimes]]]

    @classmethod
    def from_plan(cls, problem: Problem, machine: Machine, plan: Plan) -> SimulatedPlan:
        ran, ticks = last_step_times(plan, problem.profile, machine), len(problem.live)
        absences, writes, reads = _absences_with_times(problem, plan, ran.transfers)
        evicted: dict[tuple[int, int | None], int] = defaultdict(int)
        runs: dict[tuple[Route, bool], list[tuple[int, TransferTimes]]] = defaultdict(list)
        for absence in absences:
            gap = problem.gaps[absence.gap]
            evicted[gap.tensor, gap.version] += 1
            runs[absence.route, False].append((absence.trigger % ticks, reads[absence.gap]))
            if absence.gap in writes:
                runs[absence.route, True].append(((gap.start + 1) % ticks, writes[absence.gap]))
        clock = Clock(ran.entered_ns, ran.took_ns)
        return cls(problem, plan, absences, clock, writes, reads, ran.stalls_ns, evicted, runs)

    def ranges_around_stalls(self) -> list[tuple[int, int]]:
        """Return ranges of ticks around stalls (waits of compute). Each range ends soon after a stall.

        The ranges are in the order of WIDTHS. For each width, the range of the longest stall is first.
        """
        ticks, found = len(self.problem.live), []
        for width in WIDTHS:
            for tick in sorted(self.stalls_ns, key=lambda tick: (-self.stalls_ns[tick], tick)):
                end = min(tick + width // 4, ticks)
                found.append((max(end - width, 0), end))
        return found

    def build_window(self, first: int, end: int) -> Window | None:
        """Return the window of these ticks. Return None if no gap may change in the window, or more than
        MOST_FREE.
        """
        view = _View(self, first, end)
        free = [view.movable_gap_of_absence(absence) for absence in self.absences]
        inside = [each for each in free if each is not None]
        inside += view.movable_resident_gaps()
        if not 0 < len(inside) <= MOST_FREE:
            return None
        indices = {each.index for each in inside}
        ledger = BytesByTick(self.problem.live)
        for absence in self.absences:
            if absence.gap not in indices:
                size = self.problem.gaps[absence.gap].size_bytes
                ledger.add_bytes_between(absence.free, absence.trigger, -size)
        homes = {home.tensor for home in self.plan.homes}
        tensors = self.problem.profile.tensors
        unused = sum(g.size_bytes for g in self.problem.gaps if g.unused and tensors[g.tensor].name in homes)
        need = tuple(int(row) - unused - self.plan.budget_bytes for row in ledger.rows[first:end])
        took_ns = self.clock.ns_at_tick(end) - self.clock.ns_at_tick(first)
        return Window(False, first, end, tuple(inside), need, took_ns, *view.lane_busy_and_late_ns())


@dataclass(frozen=True, slots=True)
class _View:
    """A simulated plan, seen from one window: the ticks from `first` up to `end`."""

    state: SimulatedPlan
    first: int
    end: int

    def movable_gap_of_absence(self, absence: Absence) -> MovableGap | None:
        """Return the movable gap of an absence. Return None if no tick of the window issues one of its
        transfers or waits for one.
        """
        problem, at = self.state.problem, self.state.clock.ns_at_tick
        gap, ticks = problem.gaps[absence.gap], len(problem.live)
        f, t, write = absence.free, absence.trigger, self.state.writes.get(absence.gap)
        out, free, trigger, ready = (self._is_in_window(x) for x in (gap.start + 1, f, t, gap.end))
        if not (free or trigger or (out and write) or ready):
            return None
        frees = (
            self._ticks_for_edge_in_window(f, gap.start + 1, gap.end - 1 if trigger else t - 1)
            if free
            else (f,)
        )
        triggers = (
            self._ticks_for_edge_in_window(t, gap.start + 2 if free else f + 1, gap.end) if trigger else (t,)
        )
        read = self.state.reads[absence.gap]
        written_ns = (
            write.end_ns - self._window_start_ns_since_issue(gap.start + 1, f)
            if write and free and not out
            else 0
        )
        return MovableGap(
            absence.gap,
            frees,
            triggers,
            (absence.route,),
            must=not (free and trigger and self._has_no_evicted_sibling(absence.gap)),
            writes=write is not None and (out or free),
            written_ns=max(written_ns, 0),
            read_ns=max(read.end_ns - self._window_start_ns_since_issue(t, gap.end), 0),
            write_late_ns=at(f) - at((gap.start + 1) // ticks * ticks + self.end),
            read_late_ns=at(gap.end) - at(t // ticks * ticks + self.end),
        )

    def movable_resident_gaps(self) -> Iterator[MovableGap]:
        """Yield gaps in the window in which the plan does not evict the tensor. Yield only the largest of
        them.
        """
        problem, ticks = self.state.problem, len(self.state.problem.live)
        evicted = {absence.gap for absence in self.state.absences}
        routes = {problem.gaps[absence.gap].tensor: absence.route for absence in self.state.absences}
        found = []
        for index, gap in enumerate(problem.gaps):
            inside = self.first <= gap.start + 1 and gap.end < self.end
            if inside and index not in evicted and not gap.unused and self._has_no_evicted_sibling(index):
                found.append((-gap.size_bytes, index))
        for _, index in sorted(found)[:MOST_NEW]:
            gap = problem.gaps[index]
            assert gap.end < ticks, gap
            yield MovableGap(
                index,
                tuple(range(gap.start + 1, gap.end)),
                tuple(range(gap.start + 2, gap.end + 1)),
                (routes[gap.tensor],) if gap.tensor in routes else problem.routes[:1],
                writes=gap.version is not None,
            )

    def lane_busy_and_late_ns(self) -> tuple[dict[tuple[Route, bool], int], dict[tuple[Route, bool], int]]:
        """Return two maps by lane: (1) how long earlier transfers use the lane after the window's start, (2)
        how long the lane may be busy after the window's end.
        """
        at, ticks = self.state.clock.ns_at_tick, len(self.state.problem.live)
        begin_ns, end_ns, period_ns = at(self.first), at(self.end), at(ticks)
        busy: dict[tuple[Route, bool], int] = {}
        late: dict[tuple[Route, bool], int] = {}
        for lane, runs in self.state.runs.items():
            before = max(ran.end_ns - (tick >= self.first) * period_ns for tick, ran in runs)
            served = max(ran.end_ns - (tick >= self.end) * period_ns for tick, ran in runs)
            following = min(ran.start_ns + (tick < self.end) * period_ns for tick, ran in runs)
            busy[lane] = max(before - begin_ns, 0)
            late[lane] = max(served - end_ns, following - end_ns, 0)
        return busy, late

    def _window_start_ns_since_issue(self, issued: int, waited: int) -> int:
        """Return the start time of the window in the step of tick `waited`.

        The time counts from the start of the step in which tick `issued` is. The two ticks may be in
        different steps.
        """
        ticks = len(self.state.problem.live)
        return self.state.clock.ns_at_tick((waited // ticks - issued // ticks) * ticks + self.first)

    def _is_in_window(self, tick: int) -> bool:
        return self.first <= tick % len(self.state.problem.live) < self.end

    def _ticks_for_edge_in_window(self, now: int, low: int, high: int) -> tuple[int, ...]:
        """Return the ticks in the window, from `low` to `high`, to which a `free` or `trigger` at tick `now`
        may change.
        """
        lap = now - now % len(self.state.problem.live)
        return tuple(range(max(low, lap + self.first), min(high, lap + self.end - 1) + 1))

    def _has_no_evicted_sibling(self, index: int) -> bool:
        """Return True if an eviction in this gap may be added or removed without an effect on other gaps.

        If the plan evicts the same bytes in several gaps, the first eviction writes the copy for all of them.
        So return False if the plan evicts these bytes in another gap. A tensor that no kernel writes has a
        copy already, so no eviction writes one. For such a tensor, return True.
        """
        gap = self.state.problem.gaps[index]
        others = self.state.evicted.get((gap.tensor, gap.version), 0) - (index in self.state.reads)
        return gap.version is None or others == 0


def _absences_with_times(
    problem: Problem, plan: Plan, ran: dict[Move, TransferTimes]
) -> tuple[tuple[Absence, ...], dict[int, TransferTimes], dict[int, TransferTimes]]:
    """Return the plan's absences (gaps in which a tensor is evicted). Also return the times of the writes and
    of the reads, by gap.
    """
    ticks, routes = len(problem.live), {route.tier: route for route in problem.routes}
    names = {tensor.name: index for index, tensor in enumerate(problem.profile.tensors)}
    gaps: dict[int, list[int]] = defaultdict(list)
    for index, gap in enumerate(problem.gaps):
        gaps[gap.tensor].append(index)
    found: dict[int, Absence] = {}
    writes: dict[int, TransferTimes] = {}
    reads: dict[int, TransferTimes] = {}
    for move in plan.moves:
        if isinstance(move, Fetch):
            index = next(
                i for i in gaps[names[move.tensor]] if problem.gaps[i].end % ticks == move.ready % ticks
            )
            trigger = problem.gaps[index].end - (move.ready - move.trigger)
            found[index] = Absence(index, routes[move.source], 0, 0, 0, trigger)
            reads[index] = ran[move]
    frees: dict[int, int] = {}
    for move in plan.moves:
        if isinstance(move, Evict):
            for index in gaps[names[move.tensor]]:
                gap = problem.gaps[index]
                after = (move.free - gap.start) % ticks
                if index in found and 0 < after < gap.end - gap.start:
                    frees[index] = gap.start + after
                    if move.trigger is not None:
                        writes[index] = ran[move]
    return tuple(replace(found[index], free=frees[index]) for index in sorted(found)), writes, reads
