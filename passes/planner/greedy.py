"""The greedy planner. In: a problem and a budget. Out: the best plan of a small portfolio, by simulation.

One rung of the portfolio: choose gaps down to a target (`choose`), time them within the budget (`timing`),
simulate, and time them twice more with the simulated clock, which knows where compute waits. Some rungs count
a gap only for as long as its own transfers hide behind kernels; they may lead nowhere. The others count all
of it, and the first of them leads to a plan whenever there is one: at worst it streams everything and waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

from teraio.machine import Machine
from teraio.plan import Evict, Fetch, Home, Move, Plan

from .choose import Choice, choose, no_room
from .problem import Problem, transfer_ns
from .simulate import entered_ns
from .timing import Absence, Clock, hidden_windows, time

# Shares of the way from the budget to the floor that a target goes down: room for transfers in flight. On
# seven synthetic Llama steps (8 and 32 layers, 20 to 80 GB, 4 and 8 SSDs) the best share was 0 to 0.5.
HIDDEN = (0.0, 0.15, 0.3, 0.5)
LADDER = (0.0, 0.05, 0.25, 0.5, 0.75)


def greedy(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """The fastest plan found. Stops when one meets the bound or the time is up; `seed` changes nothing."""
    stop = monotonic() + time_limit_s
    best, best_ns = Plan("", "greedy", budget_bytes), -1
    for choice in _choices(problem, budget_bytes):
        clock = _even_clock(problem, choice)
        for writes_first in (False, True, False):
            absences = time(problem, choice, budget_bytes, clock, writes_first)
            plan = _as_plan(problem, choice, absences, budget_bytes)
            entered, period_ns = entered_ns(plan, problem.profile, machine)
            if best_ns < 0 or period_ns < best_ns:
                best, best_ns = plan, period_ns
            if best_ns <= bound_ns or monotonic() > stop:
                return best
            clock = Clock(entered, period_ns)
    if best_ns < 0:
        raise no_room(problem, budget_bytes)
    return best


def _choices(problem: Problem, budget_bytes: int) -> Iterator[Choice]:
    """The portfolio: first what hides every transfer behind kernels if links are free, then the ladder."""
    room = budget_bytes - int(problem.floor.max())
    widest = [(gap.start + 1, gap.end) for gap in problem.gaps]
    for shares, windows in ((HIDDEN, hidden_windows(problem)), (LADDER, widest)):
        yield from choose(problem, [budget_bytes - int(share * room) for share in shares], windows)


def _even_clock(problem: Problem, choice: Choice) -> Clock:
    """Kernel times, stretched evenly to what the busiest link needs: such steps wait somewhere anyway."""
    busy: dict[tuple[str, str], int] = {}
    seen: set[tuple[int, int | None]] = set()
    for index in choice.gaps:
        gap = problem.gaps[index]
        if gap.unused:
            continue
        route, version = choice.routes[gap.tensor], (gap.tensor, gap.version)
        out, back = (route.tier, "out"), (route.tier, "back")
        busy[back] = busy.get(back, 0) + transfer_ns(route.back, gap.size_bytes)
        if gap.version is not None and version not in seen:
            seen.add(version)
            busy[out] = busy.get(out, 0) + transfer_ns(route.out, gap.size_bytes)
    durations = [kernel.duration_ns for kernel in problem.profile.kernels] or [0]
    compute_ns = sum(durations)
    period_ns = max(compute_ns, *busy.values(), 1) if busy else max(compute_ns, 1)
    entered, now = [], 0
    for duration in durations:
        entered.append(now * period_ns // compute_ns if compute_ns else 0)
        now += duration
    return Clock(entered, period_ns)


def _as_plan(problem: Problem, choice: Choice, absences: list[Absence], budget_bytes: int) -> Plan:
    """Moves in the order in which an engine issues them, and homes of what is away when the step ends."""
    ticks = len(problem.live)
    tensors = problem.profile.tensors
    issued: list[tuple[int, int, int, Move]] = []
    homes = [
        Home(tensors[gap.tensor].name, choice.routes[gap.tensor].tier)
        for gap in (problem.gaps[i] for i in choice.gaps)
        if gap.unused
    ]
    for absence, writes in _writers(problem, absences):
        gap = problem.gaps[absence.gap]
        name, tier = tensors[gap.tensor].name, absence.route.tier
        out = gap.start + 1 if writes else absence.free
        shift = out // ticks * ticks
        evict = Evict(name, tier, absence.free - shift, out - shift if writes else None)
        shift = absence.trigger // ticks * ticks
        fetch = Fetch(name, tier, absence.trigger - shift, gap.end - shift)
        issued.append((out % ticks, 0, absence.free, evict))
        issued.append((fetch.trigger, 1, fetch.ready, fetch))
        if absence.free < ticks <= gap.end:
            homes.append(Home(name, tier))
    issued.sort(key=lambda entry: (*entry[:3], entry[3].tensor))
    return Plan(
        "",
        "greedy",
        budget_bytes,
        tuple(sorted(homes, key=lambda home: home.tensor)),
        tuple(entry[3] for entry in issued),
    )


def _writers(problem: Problem, absences: list[Absence]) -> Iterator[tuple[Absence, bool]]:
    """Each absence, and whether it writes: the first of a version that is left does (they come by age)."""
    seen: set[tuple[int, int | None]] = set()
    for absence in absences:
        gap = problem.gaps[absence.gap]
        version = (gap.tensor, gap.version)
        yield absence, gap.version is not None and version not in seen
        seen.add(version)
