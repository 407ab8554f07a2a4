"""A part of a plan as an integer program. In: gaps that may change in a window of ticks. Out: the best.

Unknown are, per gap, whether it is away and on which route, the tick at which its bytes are gone, and that at
which its fetch is issued, each out of a list; and when every kernel and every transfer starts. Ticks are
coded by order, one bit per tick of the list that says "by then", so that the ledger is linear. Lanes serve
in the order in which a plan issues: by tick, then as `plan_of_absences` sorts.

Two kinds of windows. *Around* the step: all gaps are free, tick x + K comes one step after tick x, and the
step is minimized. *Within* the step: its ticks from `first` up to `end`. What was issued before runs as it
did; what is issued in the window may end as long after the end of the window as it did, or as nobody waited;
the time from `first` to `end` is minimized.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import Any

from ..problem import solvers
from ..problem.problem import Problem, Route, transfer_ns
from .windows import GapSolution, MovableGap, Window

UNITS = 10_000  # times in a program are this fine, or exact
EFFORT = 0.5  # of the solver, in its own seconds, which do not depend on the machine


@dataclass(slots=True)
class _TickVariable:
    """A tick out of a list: `by[m]` says that it is at most `ticks[m]`; the last of them, that it exists."""

    ticks: tuple[int, ...]
    by: list[Any]

    def is_at_or_before(self, tick: int) -> Any:
        """Whether the edge is at or before this tick."""
        place = bisect_right(self.ticks, tick) - 1
        return self.by[place] if place >= 0 else 0

    def chosen_tick(self) -> Any:
        """The tick, if the edge exists."""
        steps = [(b - a) * (1 - by) for (a, b), by in zip(pairwise(self.ticks), self.by, strict=False)]
        return self.ticks[0] + sum(steps)


@dataclass(slots=True)
class _Transfer:
    """On a lane if `on`; `start` from the beginning of the step in which it is issued, or of the window."""

    start: Any
    on: Any
    duration: int
    order: Any
    lowest: int
    highest: int


def solve_window(
    problem: Problem, window: Window, time_limit_s: float, seed: int
) -> list[GapSolution] | None:
    """The best choice for the window that is found in the time; None if there is none below `below_ns`."""
    if not solvers.is_ortools_installed():
        return None
    from ortools.sat.python import cp_model

    program = _Program(problem, window, cp_model.CpModel())
    for free in window.free:
        program.add_gap(free)
    program.add_limit_rows()
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would leave SIGINT to the system: Ctrl-C then kills
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = EFFORT
    solver.parameters.max_time_in_seconds = max(time_limit_s, 0.001)
    status = solver.solve(program.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [
        GapSolution(
            free.index,
            next((route for route, on in gap.on.items() if solver.value(on)), None),
            solver.value(gap.free.chosen_tick()),
            solver.value(gap.trigger.chosen_tick()),
        )
        for free, gap in zip(window.free, program.gaps, strict=True)
    ]


def _choose_time_unit_ns(problem: Problem, window: Window) -> int:
    """The largest unit in which a step is exact, or one that is fine enough: bounds move in such steps."""
    times = [kernel.duration_ns for kernel in problem.profile.kernels]
    for free in window.free:
        size = problem.gaps[free.index].size_bytes
        times += [transfer_ns(link, size) for route in free.routes for link in (route.out, route.back)]
    return max(gcd(*times), window.below_ns // UNITS, 1)


@dataclass(slots=True)
class _GapVariables:
    """The unknowns of one gap."""

    free: _TickVariable
    trigger: _TickVariable
    on: dict[Route, Any]  # away, by route
    away: Any


@dataclass(slots=True)
class _Program:
    """The program under construction."""

    problem: Problem
    window: Window
    model: Any
    gaps: list[_GapVariables] = field(default_factory=list)
    lanes: dict[tuple[Route, bool], list[_Transfer]] = field(default_factory=lambda: defaultdict(list))
    routes: dict[int, dict[Route, Any]] = field(default_factory=dict)  # by tensor
    issued: dict[int, Any] = field(default_factory=dict)  # by tick: when its writes are waited for
    begun: dict[int, Any] = field(default_factory=dict)  # by tick: when its kernel starts
    sure: Any = None  # a bit that is true
    unit_ns: int = 1  # of all times in the program
    took: Any = None  # the step, or the window
    needs: list[list[tuple[int, Any]]] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)  # tensors by name: the last thing a plan sorts by

    def __post_init__(self) -> None:
        window, kernels = self.window, self.problem.profile.kernels
        self.unit_ns = _choose_time_unit_ns(self.problem, window)
        tensors = {self.problem.gaps[free.index].tensor for free in window.free}
        names = self.problem.profile.tensors
        self.ranks = {one: rank for rank, one in enumerate(sorted(tensors, key=lambda i: names[i].name))}
        self.sure = self.model.new_constant(1)
        self.took = self._new_time()
        self.model.add(self.took <= (window.below_ns - 1) // self.unit_ns)
        self.model.minimize(self.took)
        self.needs = [[] for _ in range(window.first, window.end)]
        entered: Any = 0
        for tick in range(window.first, window.end):
            self.issued[tick], self.begun[tick] = self._new_time(), self._new_time()
            self.model.add(self.issued[tick] >= entered)
            self.model.add(self.begun[tick] >= self.issued[tick])
            entered = self.begun[tick] + self._ns_to_units(kernels[tick].duration_ns)
        self.model.add(self.took == entered)

    def add_gap(self, free: MovableGap) -> None:
        """One gap: its edges, what it does to the ledger, its transfers."""
        gap, ticks = self.problem.gaps[free.index], len(self.problem.live)
        away = self.sure if free.must else self._new_bit()
        edges = [
            _TickVariable(options, [*(self._new_bit() for _ in options[1:]), away])
            for options in (free.frees, free.triggers)
        ]
        for edge in edges:
            for earlier, later in pairwise(edge.by):
                self.model.add_implication(earlier, later)
        mine = _GapVariables(edges[0], edges[1], self._evicted_bit_by_route(free, away), away)
        self.gaps.append(mine)
        for tick in sorted({*free.frees, *free.triggers}):
            self.model.add(mine.trigger.is_at_or_before(tick) <= mine.free.is_at_or_before(tick - 1))
        for tick in range(gap.start + 1, gap.end):
            row = tick % ticks - self.window.first
            if 0 <= row < len(self.needs):
                self.needs[row].append((gap.size_bytes, mine.free.is_at_or_before(tick)))
                self.needs[row].append((-gap.size_bytes, mine.trigger.is_at_or_before(tick)))
        self._add_write_of_gap(free, mine, self._bit_whether_gap_writes(free, away))
        self._add_fetch_of_gap(free, mine)

    def _add_write_of_gap(self, free: MovableGap, mine: _GapVariables, writes: Any) -> None:
        """Issued when the gap begins; the kernels from `free` on wait for it."""
        gap, ticks = self.problem.gaps[free.index], len(self.problem.live)
        out = gap.start + 1
        if isinstance(writes, int):
            return
        inside = self._is_in_window(out)
        start = self._new_time()
        ends = [
            (on, start + self._ns_to_units(transfer_ns(route.out, gap.size_bytes)))
            for route, on in mine.on.items()
        ]
        if inside:
            self.model.add(start >= self._tick_entry_time(out))
        else:
            ends = [(on, self._ns_to_units(free.written_ns)) for on in mine.on.values()]
        for on, end in ends:
            if not self._is_in_window(free.frees[-1]):
                self.model.add(end <= self.took + self._ns_to_units(free.write_late_ns)).only_enforce_if(
                    on, writes
                )
            for tick in free.frees:
                if self._is_in_window(tick):
                    waits = [on, writes, mine.free.is_at_or_before(tick)]
                    self.model.add(self._time_at_tick(self.issued, tick) >= end).only_enforce_if(waits)
        if inside:
            scale, rank = self._order_key_factor(), self.ranks[gap.tensor]
            order = (out % ticks * scale + mine.free.chosen_tick()) * len(self.problem.gaps) + rank
            span = [(out % ticks * scale + f) * len(self.problem.gaps) + rank for f in free.frees]
            for route, on in mine.on.items():
                both = self._and_of_bits(on, writes)
                duration = self._ns_to_units(transfer_ns(route.out, gap.size_bytes))
                lap = out // ticks if self.window.around else 0
                moved = _Transfer(start - lap * self.took, both, duration, order, span[0], span[-1])
                self.lanes[route, True].append(moved)

    def _add_fetch_of_gap(self, free: MovableGap, mine: _GapVariables) -> None:
        """Issued at the trigger, after its waits for writes; the kernel at the gap's end waits for it."""
        gap, ticks = self.problem.gaps[free.index], len(self.problem.live)
        ready = self._is_in_window(gap.end)
        if not self._is_in_window(free.triggers[0]):
            if ready:
                late = self.model.add(
                    self._time_at_tick(self.begun, gap.end) >= self._ns_to_units(free.read_ns)
                )
                late.only_enforce_if(mine.away)
            return
        start = self._new_time()
        for place, tick in enumerate(free.triggers):
            after = [mine.away] if place == 0 else [mine.away, mine.trigger.by[place - 1].negated()]
            self.model.add(start >= self._time_at_tick(self.issued, tick)).only_enforce_if(after)
        lap: Any = free.triggers[0] // ticks
        if free.triggers[-1] // ticks != lap:
            lap = 1 - mine.trigger.is_at_or_before(ticks - 1)
        scale, rank, count = self._order_key_factor(), self.ranks[gap.tensor], len(self.problem.gaps)
        order = (scale * (mine.trigger.chosen_tick() - ticks * lap) + gap.end - ticks * lap) * count + rank
        places = [(scale * (t % ticks) + gap.end - t // ticks * ticks) * count + rank for t in free.triggers]
        begin = start
        if self.window.around:
            begin = self._new_time() if not isinstance(lap, int) else start - lap * self.took
            if not isinstance(lap, int):
                early = mine.trigger.is_at_or_before(ticks - 1)
                self.model.add(begin == start).only_enforce_if(early)
                self.model.add(begin + self.took == start).only_enforce_if(early.negated(), mine.away)
        for route, on in mine.on.items():
            duration = self._ns_to_units(transfer_ns(route.back, gap.size_bytes))
            end = (
                self._time_at_tick(self.begun, gap.end)
                if ready
                else self.took + self._ns_to_units(free.read_late_ns)
            )
            self.model.add(start + duration <= end).only_enforce_if(on)
            moved = _Transfer(begin, on, duration, order, min(places), max(places))
            self.lanes[route, False].append(moved)

    def add_limit_rows(self) -> None:
        """The ledger, and lanes that serve one transfer at a time, in order."""
        for need, terms in zip(self.window.need_bytes, self.needs, strict=True):
            if need > 0:
                self.model.add(sum(size * by for size, by in terms) >= need)
        for route, room in self.window.room_bytes.items():
            for tick in range(self.window.first, self.window.end):
                self.model.add(sum(size * bit for size, bit in self._copy_bits_in_tier(route, tick)) <= room)
        for lane, transfers in self.lanes.items():
            busy = self._ns_to_units(self.window.busy_ns.get(lane, 0))
            for moved in transfers:
                end = moved.start + moved.duration
                self.model.add(moved.start >= busy).only_enforce_if(moved.on)
                if not self.window.around:
                    late = self.took + self._ns_to_units(self.window.late_ns.get(lane, 0))
                    self.model.add(end <= late).only_enforce_if(moved.on)
            if self.window.around:  # follows from the order, but not quickly
                self.model.add(sum(moved.duration * moved.on for moved in transfers) <= self.took)
            self._order_lane_transfers(sorted(transfers, key=lambda moved: moved.lowest))

    def _copy_bits_in_tier(self, route: Route, tick: int) -> Iterator[tuple[int, Any]]:
        """Tensors that may have a copy in a tier at a tick: all step long, or while they live."""
        for index in sorted({self.problem.gaps[free.index].tensor for free in self.window.free}):
            tensor = self.problem.profile.tensors[index]
            uses = (*tensor.reads, *tensor.writes)
            if tensor.persistent or min(uses) <= tick <= max(uses):
                copy = self._new_bit()
                for free, gap in zip(self.window.free, self.gaps, strict=True):
                    if self.problem.gaps[free.index].tensor == index and route in gap.on:
                        self.model.add_implication(gap.on[route], copy)
                yield tensor.size_bytes, copy

    def _order_lane_transfers(self, transfers: list[_Transfer]) -> None:
        """Pair by pair; within a step those are left out that a transfer which is sure to run keeps apart."""
        for place, a in enumerate(transfers):
            between = [
                c.highest for c in transfers[place + 1 :] if c.on is self.sure and c.lowest > a.highest
            ]
            reach = a.highest if not between else min(between)
            for b in transfers[place + 1 :]:
                if self.window.around or not between or b.lowest <= reach:
                    self._order_transfer_pair(a, b)

    def _order_transfer_pair(self, a: _Transfer, b: _Transfer) -> None:
        for one, two in ((a, b), (b, a)):
            if one.highest < two.lowest:
                self._require_transfer_before_other(one, two, [one.on, two.on])
                return
        first = self._new_bit()
        self.model.add(a.order < b.order).only_enforce_if(first, a.on, b.on)
        self.model.add(b.order < a.order).only_enforce_if(first.negated(), a.on, b.on)
        self._require_transfer_before_other(a, b, [first, a.on, b.on])
        self._require_transfer_before_other(b, a, [first.negated(), a.on, b.on])

    def _require_transfer_before_other(self, one: _Transfer, two: _Transfer, given: list[Any]) -> None:
        self.model.add(one.start + one.duration <= two.start).only_enforce_if(given)
        if self.window.around:
            self.model.add(two.start + two.duration <= one.start + self.took).only_enforce_if(given)

    def _evicted_bit_by_route(self, free: MovableGap, away: Any) -> dict[Route, Any]:
        """Away by route; a tensor keeps one."""
        tensor = self.problem.gaps[free.index].tensor
        if len(free.routes) == 1:
            return {free.routes[0]: away}
        if tensor not in self.routes:
            self.routes[tensor] = {route: self._new_bit() for route in free.routes}
            self.model.add_exactly_one(self.routes[tensor].values())
        return {route: self._and_of_bits(away, bit) for route, bit in self.routes[tensor].items()}

    def _bit_whether_gap_writes(self, free: MovableGap, away: Any) -> Any:
        """Whether the gap writes: the first of its version that is away does. 0 if it never does."""
        gaps, ticks = self.problem.gaps, len(self.problem.live)
        gap = gaps[free.index]
        if gap.version is None or free.writes is False:
            return 0
        if free.writes:
            return away
        mine, version = (gap.start - gap.version) % ticks, gap.version
        older = []
        for other, unknowns in zip(self.window.free, self.gaps):
            it = gaps[other.index]
            if (it.tensor, it.version) == (gap.tensor, version) and (it.start - version) % ticks < mine:
                older.append(unknowns.away)
        writes = self._new_bit()
        self.model.add_implication(writes, away)
        self.model.add_bool_or(writes, away.negated(), *older)
        for each in older:
            self.model.add_implication(writes, each.negated())
        return writes

    def _and_of_bits(self, a: Any, b: Any) -> Any:
        if a is b:
            return a
        both = self._new_bit()
        self.model.add_multiplication_equality(both, [a, b])
        return both

    def _new_bit(self) -> Any:
        return self.model.new_bool_var("")

    def _new_time(self) -> Any:
        return self.model.new_int_var(0, 3 * self.window.below_ns // self.unit_ns, "")

    def _ns_to_units(self, time_ns: int) -> int:
        return -(-time_ns // self.unit_ns)

    def _is_in_window(self, tick: int) -> bool:
        return self.window.first <= tick % len(self.problem.live) < self.window.end

    def _time_at_tick(self, times: dict[int, Any], tick: int) -> Any:
        ticks = len(self.problem.live)
        return times[tick % ticks] + (tick // ticks * self.took if self.window.around else 0)

    def _tick_entry_time(self, tick: int) -> Any:
        """When the kernel before ends."""
        ticks = len(self.problem.live)
        if tick % ticks == self.window.first:
            return tick // ticks * self.took if self.window.around else 0
        return self._time_at_tick(self.begun, tick - 1) + self._ns_to_units(
            self.problem.profile.kernels[(tick - 1) % ticks].duration_ns
        )

    def _order_key_factor(self) -> int:
        return 2 * len(self.problem.live) + 2
