"""Enumeration of every plan for a tiny planning problem, to judge bounds and exact planners.

A gap is an idle interval of a tensor between two uses. A tick is the index of a kernel in the step. In each
gap, one of two cases holds. (1) The tensor is resident on the device. (2) The tensor is evicted to one of the
slower tiers, from any tick to any later tick.

The first eviction of a version of a tensor writes this version, from the gap's first tick on. Moves that
become ready at the same tick are issued in the order in which kernels need the tensors. The ledger of
plan_check counts the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.passes.planner.greedy.choose import GapChoice
from teraio.passes.planner.greedy.greedy import plan_of_absences
from teraio.passes.planner.greedy.timing import Absence
from teraio.passes.planner.problem.problem import Gap, Problem, Route, transfer_ns
from teraio.passes.planner.simulate.simulate import step_ns


def absences(index: int, gap: Gap, route: Route) -> Iterator[Absence]:
    """Yield every way to evict the gap's tensor on this route. An absence has a tick from which the tensor's
    memory is free, and a later tick at which the fetch begins.
    """
    write_ns = 0 if gap.version is None else transfer_ns(route.out, gap.size_bytes)
    read_ns = transfer_ns(route.back, gap.size_bytes)
    for free in range(gap.start + 1, gap.end):
        for trigger in range(free + 1, gap.end + 1):
            yield Absence(index, route, write_ns, read_ns, free, trigger)


def plans(problem: Problem, budget_bytes: int) -> Iterator[Plan]:
    """Yield every plan for the problem, including plans that plan_check refuses."""
    indices = [index for index, gap in enumerate(problem.gaps) if not gap.unused]
    tensors = sorted({problem.gaps[index].tensor for index in indices})
    unused = tuple(index for index, gap in enumerate(problem.gaps) if gap.unused)
    for on in product(problem.routes, repeat=len(tensors)):
        routes = dict(zip(tensors, on, strict=True))
        routes |= {problem.gaps[index].tensor: problem.routes[0] for index in unused}
        ways = [[None, *absences(i, problem.gaps[i], routes[problem.gaps[i].tensor])] for i in indices]
        for taken in product(*ways):
            evicted = [absence for absence in taken if absence is not None]
            evicted.sort(key=lambda a: (_age(problem, a.gap), a.gap))
            choice = GapChoice(budget_bytes, (*unused, *(a.gap for a in evicted)), routes)
            yield plan_of_absences(problem, choice, evicted, budget_bytes)


def _age(problem: Problem, index: int) -> int:
    gap = problem.gaps[index]
    return (gap.start - (gap.version or 0)) % len(problem.live)


def ways(problem: Problem) -> int:
    """Return the number of plans that `plans` yields for the problem."""
    count = len(problem.routes) ** len({gap.tensor for gap in problem.gaps if not gap.unused})
    for gap in problem.gaps:
        length = gap.end - gap.start - 1
        count *= 1 if gap.unused else 1 + length * (length + 1) // 2
    return count


def best(problem: Problem, machine: Machine, budget_bytes: int) -> tuple[int, Plan] | None:
    """Return a pair: the shortest step time of all plans that plan_check accepts, and the plan with this step
    time. Return None if no plan is accepted.
    """
    found: tuple[int, Plan] | None = None
    for plan in plans(problem, budget_bytes):
        if check_plan_against_profile(plan, problem.profile, machine).feasible:
            took_ns = step_ns(plan, problem.profile, machine)
            if found is None or took_ns < found[0]:
                found = took_ns, plan
    return found
