"""Lower bounds on the time of a step, which no plan can beat, and the cost of planning.

A bound is the optimum of a linear program, and is at least as long as compute time and link time. The module
computes two bounds: (1) from kernel times of the measured steps, (2) from kernel times while the plan runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.passes.planner import planners
from teraio.passes.planner.bound.bound import lower_bound
from teraio.passes.planner.problem.problem import build_problem
from teraio.runtime.engine import engine
from teraio.runtime.ledger.recorder import Recorder
from teraio.session import session
from teraio.session.planning import PAYS_BACK_STEPS, cut_workspaces_to_budget

WATCHED = 5  # number of steps with measured kernel times
BOUND_S = 10.0  # time limit of the linear program, in seconds


def bounds(step: Callable[[], Any]) -> dict[str, Any]:
    current = session.SESSION
    assert current is not None and len(current.sources()) == 1, (
        "the session has not measured one kind of step"
    )
    ((profile, _),) = current.sources()
    machine, budget = current.planning.machine, current.engine.residency.budget_bytes
    loaded, shares = while_planned(profile, step)
    began = time.perf_counter()
    planners.plan(
        profile, machine, budget, time_limit_s=current.options.plan_time / 1e9, steps=PAYS_BACK_STEPS
    )
    plan_s = time.perf_counter() - began
    predicted = current.engine.tracker.expected.predicted
    return {
        "kernels": len(profile.kernels),
        "tensors": len(profile.tensors),
        "managed_bytes": sum(tensor.size_bytes for tensor in profile.tensors),
        "plan_s": plan_s,
        "in_slots_ns": shares,
        "compute_ns": profile.compute_ns,
        "bound_ns": bound_of(profile, machine, budget),
        "compute_loaded_ns": loaded.compute_ns,
        "bound_loaded_ns": bound_of(loaded, machine, budget),
        "predicted_step_ns": predicted.step_ns if predicted else 0,
        "rates": {f"{x.source} {x.target}": x.bandwidth_bytes_per_s for x in machine.links},
    }


def bound_of(profile: Profile, machine: Machine, budget: int) -> int:
    fitting = cut_workspaces_to_budget(profile, budget)
    problem = build_problem(fitting, machine)
    return lower_bound(problem, machine, budget, time_limit_s=BOUND_S).step_ns


def while_planned(profile: Profile, step: Callable[[], Any]) -> tuple[Profile, int]:
    """Run steps under the plan and return a pair. The first result is the profile with the median kernel
    times of these steps.

    The second result is the median time of a step outside kernels, in ns. In this time slots do the engine's
    own work, or wait.
    """
    running = engine.ENGINE
    assert running is not None, "no program was compiled"
    recorder = Recorder(running.residency.budget_bytes, running.residency.reserve_bytes)
    running.attach_recorder(recorder)
    seen: list[list[int]] = []
    between: list[int] = []
    for _ in range(WATCHED):
        step()
        happened = recorder.last_whole_step()
        if happened is not None and len(happened.kernels) == len(profile.kernels):
            seen.append([end - begin for _, begin, end in happened.kernels])
            between.append(happened.end_ns - happened.began_ns - sum(seen[-1]))
    assert seen, "no whole step was recorded"
    times = [int(median(column)) for column in zip(*seen)]
    kernels = tuple(replace(k, duration_ns=t) for k, t in zip(profile.kernels, times))
    return replace(profile, kernels=kernels), int(median(between))
