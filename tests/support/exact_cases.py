"""Random training steps that are small enough to try all plans, to test planners that claim to be exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import brute
import toys

from teraio.formats.machine import Machine
from teraio.passes.planner.problem.problem import Problem, build_problem

ROOM = 10**6
# Planners that claim to be exact must be exact up to this number of used gaps. A gap is an idle interval of a
# tensor.
MOST_GAPS = 6
MACHINES = (
    toys.machine(device=ROOM, ssd=ROOM),
    toys.machine(device=ROOM, ssd=ROOM, latency_ns=700),
    toys.machine(device=ROOM, ssd=ROOM, rate=5 * toys.BYTE_PER_US),
    toys.machine(device=ROOM, ssd=ROOM, host=ROOM),
)


def cases(seeds: Iterable[int], most_ways: int) -> Iterator[tuple[int, Problem, Machine, int]]:
    """Yield (seed, problem, machine, budget). Each problem has two budgets: (1) the smallest possible one,
    and (2) the budget halfway between the smallest one and the one in which all tensors fit.
    """
    for seed in seeds:
        machine = MACHINES[seed % len(MACHINES)]
        profile = toys.random_profile(seed, 7, 5)
        if seed % 3 == 1:  # kernels take no time, so they hide no transfer
            kernels = tuple(replace(kernel, duration_ns=0) for kernel in profile.kernels)
            profile = replace(profile, kernels=kernels)
        problem = build_problem(profile, machine)
        floor, live = int(problem.floor.max()), int(problem.live.max())
        used = sum(not gap.unused for gap in problem.gaps)
        if used <= MOST_GAPS and 10 < brute.ways(problem) < most_ways:
            for budget in sorted({floor, (floor + live) // 2} - {live}):
                yield seed, problem, machine, budget
