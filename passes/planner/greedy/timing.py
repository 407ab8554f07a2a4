"""The ticks of evictions and fetches. In: the chosen gaps, and the time of each tick. Out: an absence for
each gap.

A gap is an idle interval of a tensor from its use at tick `start` to its use at tick `end`. An *absence* is a
gap in which the tensor is evicted:

    tick      start+1            free                trigger              end
    kernel    |                  |                   |                    |
              evict is issued    bytes are free      fetch is issued      tensor is needed

At first each absence is as wide as possible: free = start + 1 and trigger = end. Compute then waits for each
transfer in full, and the device has the fewest bytes. If memory has room, a fetch can begin earlier, and the
memory of an eviction can be free later. Three rounds use the room below the budget:

    1    each transfer gets the ticks that it takes if it runs alone
    2    each transfer gets the ticks that it takes with the transfers before it on its link
    3    fetches get the remaining room, in the order of their triggers

No round puts more bytes on the device than the budget, so the absences form a valid plan after each change.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from teraio.formats.profile import Profile

from ..problem.problem import BytesByTick, Problem, Route, transfer_ns
from .choose import GapChoice


@dataclass(slots=True)
class Absence:
    """A gap in which the tensor is evicted. Its bytes are free from tick `free` on, and its fetch is issued
    at tick `trigger`. `write_ns` is 0 for a drop.
    """

    gap: int
    route: Route
    write_ns: int
    read_ns: int
    free: int
    trigger: int


class Clock:
    """The time at which each tick begins.

    The step repeats: a tick of the next step begins one `period_ns` later than the same tick of this step.
    """

    def __init__(self, entered_ns: Sequence[int], period_ns: int) -> None:
        self.ticks = len(entered_ns)
        self.entered_ns = [t + lap * period_ns for lap in (-1, 0, 1, 2) for t in entered_ns]

    @classmethod
    def without_stalls(cls, profile: Profile) -> Clock:
        """Return the clock of a step whose kernels run one after another, without waits."""
        entered = [0, *accumulate(kernel.duration_ns for kernel in profile.kernels)]
        return cls(entered[:-1] or [0], max(entered[-1], 1))

    def ns_at_tick(self, tick: int) -> int:
        return self.entered_ns[tick + self.ticks]

    def last_tick_at_or_before(self, time_ns: int) -> int:
        """Return the last tick that begins at or before this time."""
        return bisect_right(self.entered_ns, time_ns) - 1 - self.ticks

    def first_tick_at_or_after(self, time_ns: int) -> int:
        """Return the first tick that begins at or after this time."""
        return bisect_left(self.entered_ns, time_ns) - self.ticks


def choose_absence_ticks(
    problem: Problem, choice: GapChoice, budget_bytes: int, clock: Clock, writes_first: bool
) -> list[Absence]:
    """Return the absences of a choice. As far as the budget allows, their transfers run while kernels run.

    Tensors that no kernel uses get no absence.
    """
    absences = _widest_absences(problem, choice)
    ledger = BytesByTick(problem.live)
    for index in choice.gaps:
        gap = problem.gaps[index]
        ledger.add_bytes_between(gap.start + 1, gap.end, -gap.size_bytes)

    def fetch_earlier(wanted: Callable[[Absence], int], absence: Absence) -> None:
        size = problem.gaps[absence.gap].size_bytes
        lowest = max(wanted(absence), absence.free)
        earlier = ledger.earliest_tick_with_room(lowest, absence.trigger, size, budget_bytes)
        ledger.add_bytes_between(earlier, absence.trigger, size)
        absence.trigger = min(earlier, absence.trigger)

    def evict_later(wanted: Callable[[Absence], int], absence: Absence) -> None:
        size = problem.gaps[absence.gap].size_bytes
        highest = min(wanted(absence), absence.trigger)
        later = ledger.latest_tick_with_room(absence.free, highest, size, budget_bytes)
        ledger.add_bytes_between(absence.free, later, size)
        absence.free = max(later, absence.free)

    written = [absence for absence in absences if absence.write_ns]
    by_end = sorted(absences, key=lambda a: (problem.gaps[a.gap].end, a.gap))
    by_start = sorted(written, key=lambda a: (problem.gaps[a.gap].start, a.gap))
    start_of, end_of = (lambda a: problem.gaps[a.gap].start + 1), (lambda a: problem.gaps[a.gap].end)
    queued_reads = _latest_fetch_starts(absences, end_of, clock)
    queued_writes = _earliest_write_ends(written, start_of, clock)
    rounds: list[tuple[Callable[[Absence], int], Callable[[Absence], int]]] = [
        (
            lambda a: clock.last_tick_at_or_before(clock.ns_at_tick(end_of(a)) - a.read_ns),
            lambda a: clock.first_tick_at_or_after(clock.ns_at_tick(start_of(a)) + a.write_ns),
        ),
        (lambda a: queued_reads[a.gap], lambda a: queued_writes[a.gap]),
    ]
    for reads, writes in rounds:
        steps = [(fetch_earlier, reads, by_end), (evict_later, writes, by_start)]
        for extend, wanted, order in reversed(steps) if writes_first else steps:
            for absence in order:
                extend(wanted, absence)
    for absence in sorted(absences, key=lambda a: (a.trigger, end_of(a), a.gap)):
        fetch_earlier(start_of, absence)
    return [absence for absence in absences if absence.free < absence.trigger]


def stall_free_tick_ranges(problem: Problem) -> list[tuple[int, int]]:
    """Return, for each gap, the range of ticks in which its tensor can be evicted without a wait of compute.

    Before and after the range, the gap's transfers run while kernels run. The range may be empty. The
    function assumes that each transfer runs alone, on the links of the fastest route.
    """
    clock, now_ns = Clock.without_stalls(problem.profile), problem.profile.compute_ns
    windows = []
    for gap in problem.gaps:
        first, end = gap.start + 1, gap.end
        if problem.routes and not gap.unused:
            route = problem.routes[0]
            write_ns = 0 if gap.version is None else transfer_ns(route.out, gap.size_bytes)
            first = (
                clock.first_tick_at_or_after(clock.ns_at_tick(first) + write_ns) if write_ns < now_ns else end
            )
            read_ns = min(transfer_ns(route.back, gap.size_bytes), now_ns)
            end = clock.last_tick_at_or_before(clock.ns_at_tick(end) - read_ns)
        # Several ticks begin at the same time if kernels have no duration. So a tick found by its time may be
        # outside the gap.
        first, end = max(first, gap.start + 1), min(end, gap.end)
        windows.append((first, end) if first < end else (gap.end, gap.end))
    return windows


def _widest_absences(problem: Problem, choice: GapChoice) -> list[Absence]:
    """Return the widest absence of each gap: free = start + 1 and trigger = end.

    Among gaps with the same bytes, the first eviction writes the copy, and the others are drops.
    """
    ticks, seen = len(problem.live), set()
    absences = []
    for index in sorted(choice.gaps, key=lambda i: (problem.gaps[i].ticks_since_write(ticks), i)):
        gap = problem.gaps[index]
        if gap.unused:
            continue
        route, key = choice.routes[gap.tensor], (gap.tensor, gap.version)
        writes = gap.version is not None and key not in seen
        seen.add(key)
        write_ns = transfer_ns(route.out, gap.size_bytes) if writes else 0
        absences.append(
            Absence(index, route, write_ns, transfer_ns(route.back, gap.size_bytes), gap.start + 1, gap.end)
        )
    return absences


def _latest_fetch_starts(
    absences: list[Absence], end_of: Callable[[Absence], int], clock: Clock
) -> dict[int, int]:
    """Return the last tick at which to issue each fetch, so that it ends in time.

    Each link serves fetches in the order in which their tensors are needed. The loop goes backwards over two
    steps. So it includes fetches that wait in the queue of a link at the end of a step.
    """
    wanted: dict[int, int] = {}
    until_ns: dict[Route, int] = {}
    for lap in (1, 0):
        for absence in sorted(absences, key=lambda a: (-(end_of(a) % clock.ticks), -a.gap)):
            need_ns = clock.ns_at_tick(end_of(absence) % clock.ticks + lap * clock.ticks)
            begin_ns = min(need_ns, until_ns.get(absence.route, need_ns)) - absence.read_ns
            until_ns[absence.route] = begin_ns
            wanted[absence.gap] = clock.last_tick_at_or_before(
                clock.ns_at_tick(end_of(absence)) - (need_ns - begin_ns)
            )
    return wanted


def _earliest_write_ends(
    absences: list[Absence], start_of: Callable[[Absence], int], clock: Clock
) -> dict[int, int]:
    """Return the first tick at which each write is complete, if each link serves writes in the order in which
    they are issued.
    """
    wanted: dict[int, int] = {}
    from_ns: dict[Route, int] = {}
    for lap in (0, 1):
        for absence in sorted(absences, key=lambda a: (start_of(a) % clock.ticks, a.gap)):
            ready_ns = clock.ns_at_tick(start_of(absence) % clock.ticks + lap * clock.ticks)
            done_ns = max(ready_ns, from_ns.get(absence.route, ready_ns)) + absence.write_ns
            from_ns[absence.route] = done_ns
            wanted[absence.gap] = clock.first_tick_at_or_after(
                clock.ns_at_tick(start_of(absence)) + (done_ns - ready_ns)
            )
    return wanted
