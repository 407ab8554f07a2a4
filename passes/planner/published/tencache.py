"""10Cache's sliding window over size classes. In: a problem. Out: a plan that moves no activations.

Source: 10Cache, SoCC 2025 (arXiv 2511.14124), and its code, a patch set over DeepSpeed 0.14.2:

    prefetch table      section 4.1: one dry run records every use of every tensor in execution order
    cache allocator     section 4.2: the cache has free memory / CACHE_PART bytes. All buffers are allocated
                        at the start. A size class has the tensors of one size, and gets its share of the
                        cache: the class's bytes / the bytes of all classes. A class of at most WHOLE_CLASS
                        tensors is always resident.
    placement           section 4.3: in the order of first use, tensors fill the buffers, then the host's
                        memory, then NVMe
    window              section 4.4: the window is the next rows of the table, as many tensors as there are
                        buffers. A tensor is resident while it is in the window. When a tensor leaves the
                        window, the tensor that enters the window gets its buffer.
    activations         never move; they use the memory outside the cache

A released tensor is written before another tensor fills its buffer. The optimizer computes on the device, as
in the profiles of this repository.
"""

from __future__ import annotations

from collections import defaultdict

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan

from ..greedy.choose import no_tier_room_error
from ..problem.problem import Problem
from .common import Absence, mark_writing_absences, plan_of_absences, tiers_and_ledger_without_unused
from .g10 import routes_in_tier_order

CACHE_PART = 2.5  # the cache is the budget / 2.5; the patch set takes nvidia-smi's free memory / 2.5
WHOLE_CLASS = 2  # a size class of at most this number of tensors is always resident
MANAGED = ("weight", "grad", "state")
CPU_FIRST = ("host", "ssd")


def tencache(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """Return 10Cache's plan. The schedule is fixed, so the time limit and `seed` are unused."""
    classes = _tensors_by_size(problem)
    total = sum(size * len(members) for size, members in classes.items())
    cache_bytes = int(budget_bytes / CACHE_PART)
    gaps_of: dict[int, list[int]] = defaultdict(list)
    for index, gap in enumerate(problem.gaps):
        gaps_of[gap.tensor].append(index)
    absences: list[Absence] = []
    tiers, _ = tiers_and_ledger_without_unused(problem)
    for members in classes.values():
        buffers = max(cache_bytes * len(members) // max(total, 1), _most_tensors_per_kernel(problem, members))
        if len(members) <= WHOLE_CLASS or buffers >= len(members):
            continue
        table = _Table(problem, members)
        for tensor in members:
            for index in gaps_of[tensor]:
                gap = problem.gaps[index]
                trigger = table.tick_to_fetch(tensor, gap.end, buffers)
                if gap.unused or trigger <= gap.start + 1:
                    continue
                route = next(
                    (r for r in routes_in_tier_order(problem, CPU_FIRST) if tiers.has_room(gap, r)), None
                )
                if route is None:
                    raise no_tier_room_error(problem, budget_bytes)
                tiers.assign_tier(gap, route)
                absences.append(Absence(index, route, gap.start + 1, min(trigger, gap.end)))
    absences = mark_writing_absences(problem, absences)
    fails = "it never moves activations, and its buffers for weights and states come on top"
    return plan_of_absences(problem, absences, tiers, budget_bytes, "10cache", fails)


def _tensors_by_size(problem: Problem) -> dict[int, list[int]]:
    """Return the movable weights, gradients and states by size.

    Tensors of one size are in the order of their first use.
    """
    classes: dict[int, list[int]] = defaultdict(list)
    tensors = problem.profile.tensors
    movable = {gap.tensor for gap in problem.gaps}
    used = [i for i in movable if tensors[i].kind in MANAGED and (tensors[i].reads or tensors[i].writes)]
    for index in sorted(used, key=lambda i: (min(*tensors[i].reads, *tensors[i].writes, 2**31, 2**31), i)):
        classes[tensors[index].size_bytes].append(index)
    return dict(sorted(classes.items()))


def _most_tensors_per_kernel(problem: Problem, members: list[int]) -> int:
    """Return the largest number of these tensors that one kernel uses.

    This kernel needs as many buffers at the same time.
    """
    count: dict[int, int] = defaultdict(int)
    for index in members:
        tensor = problem.profile.tensors[index]
        for tick in {*tensor.reads, *tensor.writes}:
            count[tick] += 1
    return max(count.values(), default=1)


class _Table:
    """The prefetch table of one size class: all uses of its tensors in three consecutive steps, in order."""

    def __init__(self, problem: Problem, members: list[int]) -> None:
        ticks = max(problem.ticks_per_step, 1)
        rows = [
            (tick, index)
            for index in members
            for tick in {*problem.profile.tensors[index].reads, *problem.profile.tensors[index].writes}
        ]
        self.rows = sorted((tick + lap * ticks, index) for lap in range(3) for tick, index in rows)
        self.last_before: dict[tuple[int, int], int] = {row: at for at, row in enumerate(self.rows)}

    def tick_to_fetch(self, tensor: int, tick: int, buffers: int) -> int:
        """Return the tick at which the tensor gets a buffer for its use at `tick`.

        Go back from `tick` through the table, and count the different other tensors. When the count reaches
        the number of buffers, the tensor of that row has just released its buffer. Return the tick after that
        row.
        """
        ticks_laps = self.last_before.get((tick, tensor))
        if ticks_laps is None:
            return tick
        before: set[int] = set()
        for at in range(ticks_laps - 1, -1, -1):
            used, other = self.rows[at]
            if other == tensor:
                return used + 1  # between this earlier use and the use at `tick`, the tensor keeps its buffer
            before.add(other)
            if len(before) >= buffers:
                return used + 1
        return tick
