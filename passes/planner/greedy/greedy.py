"""The greedy planner.

In: a problem and a budget. Out: the fastest of several plans, by their simulated steps.

The planner makes plans in several *rungs*. A rung chooses gaps (idle intervals of tensors) until memory is
down to a target (`choose`). It then chooses the ticks of moves within the budget (`timing`), and simulates
the plan. With the simulated times, which include stalls (waits for transfers), it chooses the ticks again.

While a write or a read runs, the tensor's bytes are on the device. So a rung counts a tensor as evicted only
for a part of its gap. The rungs differ in this part:

- The first rungs exist only if a relaxation was solved. They count the ticks that remain if transfers run
  while kernels run, or in the relaxation's stalls. Some rungs make these stalls 10 % longer. Some rungs take
  only gaps in which the relaxation evicts bytes.
- The next rungs count the ticks that remain if transfers run only while kernels run. These rungs may find no
  plan.
- The next rungs count the whole gap. The first of these rungs finds a plan if one exists and if no tier is
  full. In the worst case this plan evicts all tensors, and stalls.
- The last rungs repeat the two previous kinds with `sparing`. With `sparing`, only bytes above the target
  count as a benefit. If few bytes are above the target, the eviction of a large tensor is then not worth its
  transfers.
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

# Targets of memory: 0 stands for the budget, and 1 for the floor (the least memory in which all kernels run).
# The memory between target and budget is room for transfers in flight. The shares were measured on seven
# synthetic steps of Llama with 8 or 32 layers. The machines had 20 to 80 GB and 4 or 8 SSDs. The best share
# was between 0 and 0.5, depending on the step.
HIDDEN = (0.0, 0.15, 0.3, 0.5)
LADDER = (0.0, 0.05, 0.25, 0.5, 0.75)
# Rungs guided by the relaxation. An entry has (1) a factor for the relaxation's stalls, (2) the part of a
# gap's bytes that the relaxation must evict at least, and (3) targets as in HIDDEN. The rungs were measured
# on five steps of Llama 8B. The machines had 40 or 80 GB and 4 or 8 SSDs. Without these rungs, the plans were
# 1.1 to 2.4 % above the bound. With these rungs, the plans were 0.6 to 1.5 % above the bound.
GUIDED: tuple[tuple[float, float, tuple[float, ...]], ...] = (
    (1.0, 0.01, (0.0, 0.1, 0.2)),
    (1.1, 0.01, (0.0, 0.1, 0.2)),
    (1.1, 0.0, (0.0, 0.3, 0.5, 0.6)),
)
WRITES_FIRST = (False, True, False, True, False)  # one plan per entry; True: writes get room before fetches
HOPELESS = 1.05  # after two plans, a rung ends if its plan is slower than the best by this factor
GOOD = 1.02  # if guided rungs are within this factor of the bound, skip the others (3 of 10 s)


def greedy(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Return the fastest plan. Stop when a plan meets the bound, or when the time is up. Planners have the
    argument `seed`, but greedy does not use it.
    """
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
    """Yield every plan with its period (the simulated step time). Raise PlanError if no plan was found."""
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
    """Yield plans for one choice of gaps: choose the ticks of the moves several times, each time with the
    times of the last plan.

    Stop early if a plan is much slower than the best plan.
    """
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
    """Yield the choices of all rungs. For each, yield (choice of gaps, times of ticks for its first plan,
    True if the relaxation guided it).
    """
    room = budget_bytes - int(problem.floor.max())
    alone = replace(problem, towards=())
    # With several tiers, each setting is used two times. In variant (1) the relaxation assigns a tier to each
    # tensor. In variant (2) the load of each route decides. The variants were compared on steps of Llama 8B
    # with a host tier. On some of these steps variant (1) was better by up to 7 %. On the other steps variant
    # (2) was better by up to 7 %. On steps of Llama 70B there is time for only one setting in each variant.
    variants = (problem, alone) if len(problem.routes) > 1 else (alone,)
    guided = ((setting, variant) for setting in GUIDED for variant in variants)
    for (stretch, least_part, shares), variant in guided if problem.stalls_ns else ():
        slow = _stretch_kernels_by_stalls(variant, stretch)
        windows = [
            window if part >= least_part or gap.unused else (gap.end, gap.end)
            for window, part, gap in zip(
                stall_free_tick_ranges(slow), problem.evicted_parts, problem.gaps, strict=True
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
    """Return the problem with longer kernels: add to each kernel the relaxation's stall before it, times
    `stretch`.
    """
    kernels = tuple(
        replace(kernel, duration_ns=kernel.duration_ns + int(stretch * stall_ns))
        for kernel, stall_ns in zip(problem.profile.kernels, problem.stalls_ns, strict=True)
    )
    return replace(problem, profile=replace(problem.profile, kernels=kernels))


def _evenly_stretched_clock(problem: Problem, choice: GapChoice) -> Clock:
    """Return a clock whose step takes as long as the busiest link needs. All kernels are longer by the same
    factor.
    """
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
    """Return the plan with these absences: its homes, and its moves in the order in which the engine issues
    them.

    An absence is a gap in which the tensor is evicted. If it contains the end of the step, the tensor's home
    (its tier between steps) is the slow tier.
    """
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
    """Yield (absence, True if its eviction writes a copy).

    Absences with the same bytes are in the order of the step after the bytes' write. Only the first of them
    writes.
    """
    seen: set[tuple[int, int | None]] = set()
    for absence in absences:
        gap = problem.gaps[absence.gap]
        version = (gap.tensor, gap.version)
        yield absence, gap.version is not None and version not in seen
        seen.add(version)
