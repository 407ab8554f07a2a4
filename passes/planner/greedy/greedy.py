"""The greedy planner. In: a problem and a budget. Out: the best plan of a small portfolio, by simulation.

One rung of the portfolio: choose gaps down to a target (`choose`), time them within the budget (`timing`),
simulate, and time them again with the simulated clock, which knows where compute waits.

- If a relaxation said where the step waits and what is away, the first rungs count a gap for as long as its
  own transfers hide behind kernels and those stalls, stretched a little; some take only what is away there.
- The next count a gap only for as long as its transfers hide behind kernels; they may lead nowhere.
- The next count all of it, and the first of them leads to a plan whenever there is one: at worst it streams
  everything and waits.
- The last are like those two kinds, but they count no more bytes than are too many: where a few are, a large
  tensor is not worth its transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Fetch, Home, Move, Plan

from ..problem.problem import Problem, transfer_ns
from ..problem.progress_lines import show_best_step
from ..simulate.simulate import tick_entries_and_period
from .choose import GapChoice, choose_gaps
from .packing import pack_gaps_into_tiers
from .timing import Absence, Clock, choose_absence_ticks, stall_free_tick_ranges

# Shares of the way from the budget to the floor that a target goes down: room for transfers in flight. On
# seven synthetic Llama steps (8 and 32 layers, 20 to 80 GB, 4 and 8 SSDs) the best share was 0 to 0.5.
HIDDEN = (0.0, 0.15, 0.3, 0.5)
LADDER = (0.0, 0.05, 0.25, 0.5, 0.75)
# (stretch of the relaxation's stalls, least part away in it, shares). On five steps of Llama 8B (40 and 80
# GB, 4 or 8 SSDs) plans were 1.1 to 2.4 % above the bound without these, and are 0.6 to 1.5 % with them.
GUIDED: tuple[tuple[float, float, tuple[float, ...]], ...] = (
    (1.0, 0.01, (0.0, 0.1, 0.2)),
    (1.1, 0.01, (0.0, 0.1, 0.2)),
    (1.1, 0.0, (0.0, 0.3, 0.5, 0.6)),
)
WRITES_FIRST = (False, True, False, True, False)  # one timing each; each starts from the clock of the last
HOPELESS = 1.05  # two timings of a rung that is so much worse than the best plan are enough
GOOD = 1.02  # of the bound: with such a plan from the guided rungs, the others only cost time (3 of 10 s)


def greedy(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """The fastest plan found. Stops when one meets the bound or the time is up; `seed` changes nothing."""
    stop = monotonic() + time_limit_s
    best, best_ns = Plan("", "greedy", budget_bytes), -1
    for plan, period_ns in greedy_plans_with_periods(problem, machine, budget_bytes, bound_ns):
        if best_ns < 0 or period_ns < best_ns:
            best, best_ns = plan, period_ns
        if best_ns <= bound_ns or monotonic() > stop:
            break
    return best


def greedy_plans_with_periods(
    problem: Problem, machine: Machine, budget_bytes: int, bound_ns: int
) -> Iterator[tuple[Plan, int]]:
    """Every plan with its period. PlanError at the end if there was none."""
    best_ns = -1
    for choice, start, guided in _choices_with_clocks(problem, budget_bytes):
        if not guided and 0 <= best_ns <= bound_ns * GOOD:
            break
        for plan, period_ns in _plans_from_retimed_choice(
            problem, machine, budget_bytes, choice, start, best_ns
        ):
            yield plan, period_ns
            best_ns = period_ns if best_ns < 0 else min(best_ns, period_ns)
            show_best_step("greedy", best_ns)
    if best_ns < 0:
        choice = pack_gaps_into_tiers(problem, budget_bytes)
        yield from _plans_from_retimed_choice(
            problem, machine, budget_bytes, choice, _evenly_stretched_clock(problem, choice), best_ns
        )


def _plans_from_retimed_choice(
    problem: Problem, machine: Machine, budget_bytes: int, choice: GapChoice, clock: Clock, best_ns: int
) -> Iterator[tuple[Plan, int]]:
    """A choice, timed again and again, as long as it is not hopeless beside the best."""
    for lap, writes_first in enumerate(WRITES_FIRST):
        absences = choose_absence_ticks(problem, choice, budget_bytes, clock, writes_first)
        plan = plan_of_absences(problem, choice, absences, budget_bytes)
        entered, period_ns = tick_entries_and_period(plan, problem.profile, machine)
        yield plan, period_ns
        best_ns = period_ns if best_ns < 0 else min(best_ns, period_ns)
        if lap >= 1 and period_ns > best_ns * HOPELESS:
            break
        clock = Clock(entered, period_ns)


def _choices_with_clocks(problem: Problem, budget_bytes: int) -> Iterator[tuple[GapChoice, Clock, bool]]:
    """The portfolio: choices, each with the clock by which it is timed first, and whether it is guided."""
    room = budget_bytes - int(problem.floor.max())
    alone = replace(problem, towards=())
    # With several tiers, by the relaxation and by what each carries, in turn: on steps of Llama 8B with a
    # host tier one or the other was up to 7 % better, and at 70B there is time for one setting of each.
    tiers = (problem, alone) if len(problem.routes) > 1 else (alone,)
    told = ((each, one) for each in GUIDED for one in tiers)
    for (stretch, least_away, shares), one in told if problem.stalls_ns else ():
        slow = _stretch_kernels_by_stalls(one, stretch)
        windows = [
            window if part >= least_away or gap.unused else (gap.end, gap.end)
            for window, part, gap in zip(
                stall_free_tick_ranges(slow), problem.away, problem.gaps, strict=True
            )
        ]
        for choice in choose_gaps(slow, [budget_bytes - int(share * room) for share in shares], windows):
            yield choice, Clock.without_stalls(slow.profile), True
    problem = alone
    widest = [(gap.start + 1, gap.end) for gap in problem.gaps]
    hidden = stall_free_tick_ranges(problem)
    kinds = ((HIDDEN, hidden, False), (LADDER, widest, False), (HIDDEN, hidden, True), (LADDER, widest, True))
    for shares, windows, sparing in kinds:
        targets = [budget_bytes - int(share * room) for share in shares]
        for choice in choose_gaps(problem, targets, windows, sparing):
            yield choice, _evenly_stretched_clock(problem, choice), False


def _stretch_kernels_by_stalls(problem: Problem, stretch: float) -> Problem:
    """The same with kernels as long as they take together with the stalls before them."""
    kernels = tuple(
        replace(kernel, duration_ns=kernel.duration_ns + int(stretch * stall_ns))
        for kernel, stall_ns in zip(problem.profile.kernels, problem.stalls_ns, strict=True)
    )
    return replace(problem, profile=replace(problem.profile, kernels=kernels))


def _evenly_stretched_clock(problem: Problem, choice: GapChoice) -> Clock:
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


def plan_of_absences(problem: Problem, choice: GapChoice, absences: list[Absence], budget_bytes: int) -> Plan:
    """Moves in the order in which an engine issues them, and homes of what is away when the step ends."""
    ticks = len(problem.live)
    tensors = problem.profile.tensors
    issued: list[tuple[int, int, int, Move]] = []
    homes = [
        Home(tensors[gap.tensor].name, choice.routes[gap.tensor].tier)
        for gap in (problem.gaps[i] for i in choice.gaps)
        if gap.unused
    ]
    for absence, writes in _absences_and_whether_each_writes(problem, absences):
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


def _absences_and_whether_each_writes(
    problem: Problem, absences: list[Absence]
) -> Iterator[tuple[Absence, bool]]:
    """Each absence, and whether it writes: the first of a version that is left does (they come by age)."""
    seen: set[tuple[int, int | None]] = set()
    for absence in absences:
        gap = problem.gaps[absence.gap]
        version = (gap.tensor, gap.version)
        yield absence, gap.version is not None and version not in seen
        seen.add(version)
