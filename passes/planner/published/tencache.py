"""10Cache's sliding window over size classes. In: a problem. Out: a plan that moves no activations.

Source: 10Cache, SoCC 2025 (arXiv 2511.14124), and its code, a patch set over DeepSpeed 0.14.2:

    prefetch table      section 4.1: one dry run records every use of every tensor in execution order
    cache allocator     section 4.2: buffers are allocated once at the start, in classes of one size each; the
                        number of a class's buffers is in proportion to its share of all bytes; classes of
                        WHOLE_CLASS tensors or fewer are kept whole; the cache is free memory / CACHE_PART
    placement           section 4.3: the first tensors in order fill the buffers; the next tensors are placed
                        on the CPU, and the rest on NVMe
    window              section 4.4: when a tensor is released, the next row of the table that is not in the
                        window gets its buffer; a tensor is therefore resident exactly while it is among the
                        next rows
    activations         never move; they use the memory outside the cache

A released tensor is written before another tensor fills its buffer. The optimizer computes on the device, as
in our profiles.
"""

from __future__ import annotations

from collections import defaultdict

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan

from ..greedy.choose import no_tier_room_error
from ..problem.problem import Problem
from .common import Absence, mark_writing_absences, plan_of_absences, tiers_and_ledger_without_unused
from .g10 import routes_in_tier_order

CACHE_PART = 2.5  # the cache is memory / 2.5, as in the patch set: free memory by nvidia-smi / 2.5
WHOLE_CLASS = 2  # classes of at most this number of tensors are kept whole
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
    """Return the movable tensors by size. Each size class is in the order of first use."""
    classes: dict[int, list[int]] = defaultdict(list)
    tensors = problem.profile.tensors
    movable = {gap.tensor for gap in problem.gaps}
    used = [i for i in movable if tensors[i].kind in MANAGED and (tensors[i].reads or tensors[i].writes)]
    for index in sorted(used, key=lambda i: (min(*tensors[i].reads, *tensors[i].writes, 2**31, 2**31), i)):
        classes[tensors[index].size_bytes].append(index)
    return dict(sorted(classes.items()))


def _most_tensors_per_kernel(problem: Problem, members: list[int]) -> int:
    """Return the largest number of tensors of a class that one kernel uses.

    The kernel could not run with fewer buffers.
    """
    count: dict[int, int] = defaultdict(int)
    for index in members:
        tensor = problem.profile.tensors[index]
        for tick in {*tensor.reads, *tensor.writes}:
            count[tick] += 1
    return max(count.values(), default=1)


class _Table:
    """The rows of one size class in the prefetch table, for three consecutive steps."""

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
        """Return the tick at which the tensor used at `tick` gets a buffer.

        The buffer is released by an earlier use of another tensor, at a row of the table. From this row up to
        `tick`, the table uses as many other tensors as there are buffers.
        """
        ticks_laps = self.last_before.get((tick, tensor))
        if ticks_laps is None:
            return tick
        before: set[int] = set()
        for at in range(ticks_laps - 1, -1, -1):
            used, other = self.rows[at]
            if other == tensor:
                return used + 1  # the tensor keeps its buffer between the two uses
            before.add(other)
            if len(before) >= buffers:
                return used + 1
        return tick
