"""A window of a plan as an integer program. In: gaps that may change in the window. Out: the best solution.

A *gap* is an idle interval of a tensor, and a *window* is a range of ticks (kernels). The unknowns of a gap
are a bit for its eviction, its route, and two ticks. From tick `free` on, the evicted bytes are free. At tick
`trigger`, the fetch is issued. The start of every kernel and of every transfer is unknown as well.

Both ticks are chosen from lists. A list has one bit for each entry: "the chosen tick is at or before this
entry". So the bytes on the device at a tick are a linear function of the bits. A lane (the queue of a link)
serves transfers in the order in which the plan issues them: by tick, and within a tick in the order of
`plan_of_absences`.

There are two kinds of windows:

    around    The window is the whole step of K ticks. All gaps may change. Tick x + K is tick x of the next
              step. The solver minimizes the step time.
    within    The window has the ticks from `first` up to `end` of a step. Transfers issued before the window
              keep their times. A transfer issued in the window may end after the window, but before the tick
              that waits for it. A lane may serve these transfers until the later of two times: their end
              in the plan so far, and the start of the lane's next transfer. The solver minimizes the time
              from `first` to `end`.
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

UNITS = 10_000  # a step has at most about this number of time units
EFFORT = 0.5  # limit of the solver's work, in OR-Tools' deterministic time: equal on all machines


@dataclass(slots=True)
class _TickVariable:
    """An unknown tick from the list `ticks`, coded in bits: `by[m]` is set if the chosen tick is at most
    `ticks[m]`.

    The last bit is set if any tick is chosen.
    """

    ticks: tuple[int, ...]
    by: list[Any]

    def is_at_or_before(self, tick: int) -> Any:
        """Return a bit of the solution: set if the chosen tick is at or before `tick`."""
        place = bisect_right(self.ticks, tick) - 1
        return self.by[place] if place >= 0 else 0

    def chosen_tick(self) -> Any:
        """Return an expression for the chosen tick. It has no meaning if no tick is chosen."""
        steps = [(b - a) * (1 - by) for (a, b), by in zip(pairwise(self.ticks), self.by, strict=False)]
        return self.ticks[0] + sum(steps)


@dataclass(slots=True)
class _Transfer:
    """A transfer on a lane. The plan has this transfer if bit `on` is set.

    If the window is the whole step, `start` counts from the beginning of the step in which the transfer is
    issued. Otherwise `start` counts from the beginning of the window. Lanes serve transfers in the order of
    `order`, which is between `lowest` and `highest`.
    """

    start: Any
    on: Any
    duration: int
    order: Any
    lowest: int
    highest: int


def solve_window(
    problem: Problem, window: Window, time_limit_s: float, seed: int
) -> list[GapSolution] | None:
    """Return the best solution found in the time. Return None if none was found that is shorter than
    `window.below_ns`.
    """
    if not solvers.is_ortools_installed():
        return None
    from ortools.sat.python import cp_model

    program = _Program(problem, window, cp_model.CpModel())
    for free in window.free:
        program.add_gap(free)
    program.add_limit_rows()
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    # Without this setting, OR-Tools would reset the SIGINT handler to the system's handler. Ctrl-C would then
    # kill the process.
    solver.parameters.catch_sigint_signal = False
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
    """Return the largest unit that divides all durations, or a larger one, so that a step has at most about
    UNITS units.

    The solver tightens its bounds by one unit at a time, so it is faster with fewer units.
    """
    times = [kernel.duration_ns for kernel in problem.profile.kernels]
    for free in window.free:
        size = problem.gaps[free.index].size_bytes
        times += [transfer_ns(link, size) for route in free.routes for link in (route.out, route.back)]
    return max(gcd(*times), window.below_ns // UNITS, 1)


@dataclass(slots=True)
class _GapVariables:
    """The unknowns of one gap: its eviction, its ticks and its route."""

    free: _TickVariable
    trigger: _TickVariable
    on: dict[Route, Any]  # by route: the bit that is set if the gap's tensor is evicted on this route
    evicted: Any


@dataclass(slots=True)
class _Program:
    """The integer program of one window, under construction."""

    problem: Problem
    window: Window
    model: Any
    gaps: list[_GapVariables] = field(default_factory=list)
    lanes: dict[tuple[Route, bool], list[_Transfer]] = field(default_factory=lambda: defaultdict(list))
    routes: dict[int, dict[Route, Any]] = field(default_factory=dict)  # by tensor: a bit for each route
    issued: dict[int, Any] = field(default_factory=dict)  # by tick: the time after its waits for evictions
    begun: dict[int, Any] = field(default_factory=dict)  # by tick: the time at which its kernel starts
    sure: Any = None  # a bit that is always set
    unit_ns: int = 1  # the time unit of the program
    took: Any = None  # duration of the step, or of the window
    needs: list[list[tuple[int, Any]]] = field(default_factory=list)  # by tick: (bytes, bit of the move)
    ranks: dict[int, int] = field(default_factory=dict)  # by tensor: rank of its name, the last sort key

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
        """Add one gap: its ticks, its bytes at each tick, and its transfers."""
        gap, ticks = self.problem.gaps[free.index], len(self.problem.live)
        evicted = self.sure if free.must else self._new_bit()
        edges = [
            _TickVariable(options, [*(self._new_bit() for _ in options[1:]), evicted])
            for options in (free.frees, free.triggers)
        ]
        for edge in edges:
            for earlier, later in pairwise(edge.by):
                self.model.add_implication(earlier, later)
        mine = _GapVariables(edges[0], edges[1], self._evicted_bit_by_route(free, evicted), evicted)
        self.gaps.append(mine)
        for tick in sorted({*free.frees, *free.triggers}):
            self.model.add(mine.trigger.is_at_or_before(tick) <= mine.free.is_at_or_before(tick - 1))
        for tick in range(gap.start + 1, gap.end):
            row = tick % ticks - self.window.first
            if 0 <= row < len(self.needs):
                self.needs[row].append((gap.size_bytes, mine.free.is_at_or_before(tick)))
                self.needs[row].append((-gap.size_bytes, mine.trigger.is_at_or_before(tick)))
        self._add_write_of_gap(free, mine, self._bit_whether_gap_writes(free, evicted))
        self._add_fetch_of_gap(free, mine)

    def _add_write_of_gap(self, free: MovableGap, mine: _GapVariables, writes: Any) -> None:
        """Add the write of a gap.

        The write is issued when the gap begins. The kernel at tick `free` waits for the write.
        """
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
        """Add the fetch of a gap.

        The fetch is issued at tick `trigger`, after this tick has waited for evictions. The kernel at the end
        of the gap waits for the fetch.
        """
        gap, ticks = self.problem.gaps[free.index], len(self.problem.live)
        ready = self._is_in_window(gap.end)
        if not self._is_in_window(free.triggers[0]):
            if ready:
                late = self.model.add(
                    self._time_at_tick(self.begun, gap.end) >= self._ns_to_units(free.read_ns)
                )
                late.only_enforce_if(mine.evicted)
            return
        start = self._new_time()
        for place, tick in enumerate(free.triggers):
            after = [mine.evicted] if place == 0 else [mine.evicted, mine.trigger.by[place - 1].negated()]
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
                self.model.add(begin + self.took == start).only_enforce_if(early.negated(), mine.evicted)
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
        """Add the limits of device memory and of the tiers, and the order in which lanes serve transfers."""
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
            if self.window.around:  # not necessary, but makes the solver faster
                self.model.add(sum(moved.duration * moved.on for moved in transfers) <= self.took)
            self._order_lane_transfers(sorted(transfers, key=lambda moved: moved.lowest))

    def _copy_bits_in_tier(self, route: Route, tick: int) -> Iterator[tuple[int, Any]]:
        """Yield (size, bit) for each tensor that may have a copy in this tier at this tick. The bit is set if
        it has one.

        The copy of a persistent tensor takes room for the whole step. The copy of any other tensor takes room
        from the tensor's first use to its last use.
        """
        for index in sorted({self.problem.gaps[free.index].tensor for free in self.window.free}):
            tensor = self.problem.profile.tensors[index]
            if tensor.is_alive_at(tick, self.problem.ticks_per_step):
                copy = self._new_bit()
                for free, gap in zip(self.window.free, self.gaps, strict=True):
                    if self.problem.gaps[free.index].tensor == index and route in gap.on:
                        self.model.add_implication(gap.on[route], copy)
                yield tensor.size_bytes, copy

    def _order_lane_transfers(self, transfers: list[_Transfer]) -> None:
        """Require for each pair of transfers of a lane that one ends before the other starts.

        In a window within a step, skip a pair if, in every solution, a third transfer runs between the two.
        The rows of the third transfer then order this pair as well.
        """
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

    def _evicted_bit_by_route(self, free: MovableGap, evicted: Any) -> dict[Route, Any]:
        """Return a bit for each route: set if the gap's tensor is evicted on this route.

        All gaps of a tensor use one route.
        """
        tensor = self.problem.gaps[free.index].tensor
        if len(free.routes) == 1:
            return {free.routes[0]: evicted}
        if tensor not in self.routes:
            self.routes[tensor] = {route: self._new_bit() for route in free.routes}
            self.model.add_exactly_one(self.routes[tensor].values())
        return {route: self._and_of_bits(evicted, bit) for route, bit in self.routes[tensor].items()}

    def _bit_whether_gap_writes(self, free: MovableGap, evicted: Any) -> Any:
        """Return the bit that is set if the eviction in this gap writes a copy, or 0 if it never writes a
        copy.

        A version is the contents of a tensor between two writes. Among its evicted gaps, only the first
        writes a copy.
        """
        gaps, ticks = self.problem.gaps, len(self.problem.live)
        gap = gaps[free.index]
        if gap.version is None or free.writes is False:
            return 0
        if free.writes:
            return evicted
        mine, version = (gap.start - gap.version) % ticks, gap.version
        older = []
        for other, unknowns in zip(self.window.free, self.gaps):
            it = gaps[other.index]
            if (it.tensor, it.version) == (gap.tensor, version) and (it.start - version) % ticks < mine:
                older.append(unknowns.evicted)
        writes = self._new_bit()
        self.model.add_implication(writes, evicted)
        self.model.add_bool_or(writes, evicted.negated(), *older)
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
        """Return the time at which a tick begins: the end of the previous kernel."""
        ticks = len(self.problem.live)
        if tick % ticks == self.window.first:
            return tick // ticks * self.took if self.window.around else 0
        return self._time_at_tick(self.begun, tick - 1) + self._ns_to_units(
            self.problem.profile.kernels[(tick - 1) % ticks].duration_ns
        )

    def _order_key_factor(self) -> int:
        return 2 * len(self.problem.live) + 2
