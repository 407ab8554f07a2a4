"""Planners: a profile, a machine and a budget in, a plan out.

    plan(profile, machine, budget_bytes)     -> a plan that plan_check has accepted, with its predicted step
    smallest_budget(profile)                 -> the budget below which there is none
    tensors_to_recompute(profile, ...)       -> what `plan` with `recompute` would make again
    bound_ns(profile, machine, budget_bytes) -> the bound that such a plan has, without the plan
    predicted_step_ns(plan, profile, machine) -> its predicted step, also where links share a bandwidth

`auto` is `greedy`, `search` and `ilp` in turn. `none` decides nothing: its plan has no moves, the engine
fetches and evicts on demand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from time import monotonic
from typing import Protocol

from teraio.errors import OptionError, PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, Predicted
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.formats.recompute import profile_with_recomputation
from teraio.progress import tell_progress

from . import joint_recompute
from .auto import CLOSE, plan_by_planners_in_turn, quick_greedy_plan
from .bound.bound import lower_bound, simple_bound_ns
from .endurance import plan_within_write_cap
from .exact.ilp import ilp
from .greedy.greedy import greedy
from .problem.problem import DEVICE, Problem, build_problem, refuse_budget_below_floor
from .problem.progress_lines import remember_bound_for_progress
from .published.g10 import g10
from .published.tencache import tencache
from .published.teraio_paper import teraio_paper
from .published.zero_infinity import zero_infinity
from .search.search import search
from .simulate import event_simulation
from .simulate.simulate import step_ns


class Planner(Protocol):
    """What a planner is: moves and homes for a problem that has a plan."""

    def __call__(
        self,
        problem: Problem,
        machine: Machine,
        budget_bytes: int,
        *,
        bound_ns: int,
        seed: int,
        time_limit_s: float,
    ) -> Plan: ...


def plan_without_moves(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """No moves: everything happens on demand."""
    return Plan("", "none", budget_bytes)


LEAST_S = 0.1  # for a plan, however long it took to choose what is made again
# Of the budget, beside what the kernels are said to need that will run again: these are estimates.
SPARE = 0.1
BOUND_SHARE = 0.25  # of the time limit, at most; steps of Llama 8B take 2 to 4 s

PLANNERS: dict[str, Planner] = {
    "auto": plan_by_planners_in_turn,
    "greedy": greedy,
    "ilp": ilp,
    "none": plan_without_moves,
    "search": search,
    # Published systems, to compare with: each file says where its rules come from.
    "zero-infinity": zero_infinity,
    "g10": g10,
    "teraio-paper": teraio_paper,
    "10cache": tencache,
}


def plan(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    *,
    planner: str = "auto",
    fingerprint: str = "",
    seed: int = 0,
    time_limit_s: float = 10.0,
    steps: int = 0,
    keep: Collection[str] = (),
    recompute: bool = False,
    write_per_day_bytes: int = 0,
) -> Plan:
    """Make a plan, check it, predict it. Tensors in `keep` and inputs stay where they are. A budget beyond
    the device's capacity is cut down to it. `auto` takes no longer than a better plan could save in so many
    `steps`, if that is given. `recompute`: what can be made again may be; then the plan's moves and its step
    are those of the longer step (recompute.py). With `write_per_day_bytes` a step takes as long as its
    writes to SSDs may.

    Raises PlanError with the certificate if there is no plan: the kernel whose working set exceeds the
    budget, or the tiers that cannot hold what must be away. A plan of `none` promises nothing about memory,
    so it is the only one that the check may refuse; then only the bound is predicted (step and peak are 0).
    """
    if planner not in PLANNERS:
        raise OptionError(f"planner={planner!r} is unknown; there are {', '.join(sorted(PLANNERS))}")
    budget_bytes = min([budget_bytes, *(t.capacity_bytes for t in machine.tiers if t.name == DEVICE)])
    refuse_budget_below_floor(build_problem(profile, machine, keep), budget_bytes)

    def plan_on_machine(on: Machine, share: float) -> Plan:
        problem, step, choice = build_problem(profile, on, keep), profile, None
        limit_s = share * time_limit_s
        stop = monotonic() + limit_s
        if recompute and planner != "none":
            choice = joint_recompute.choose_tensors_to_recompute(problem, on, budget_bytes, keep, limit_s)
            if choice is not None and choice.names:
                step = profile_with_recomputation(profile, choice.names)
                problem = build_problem(step, on, keep)
        left_s = max(stop - monotonic(), LEAST_S)
        made, bound_ns = _plan_and_bound(problem, on, budget_bytes, planner, seed, left_s, steps)
        names = choice.names if choice is not None else ()
        bound_ns = choice.bound_ns if choice is not None else bound_ns
        made = replace(made, fingerprint=fingerprint, planner=planner, recompute=names)
        return _check_plan_and_add_prediction(made, profile, step, machine, bound_ns)

    if write_per_day_bytes:
        return plan_within_write_cap(plan_on_machine, profile, machine, write_per_day_bytes)
    return plan_on_machine(machine, 1.0)


def _check_plan_and_add_prediction(
    made: Plan, profile: Profile, step: Profile, machine: Machine, bound_ns: int
) -> Plan:
    """`step`: the profile, with what is made again made again."""
    verdict = check_plan_against_profile(made, profile, machine)
    if not verdict.feasible and made.planner == "none":
        return replace(made, predicted=Predicted(0, bound_ns, 0))
    if not verdict.feasible:
        raise PlanError(f"planner {made.planner!r} made a plan that the check refuses: {verdict.problems[0]}")
    return replace(
        made, predicted=Predicted(predicted_step_ns(made, step, machine), bound_ns, verdict.peak_bytes)
    )


def bound_ns(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    *,
    time_limit_s: float = 10.0,
    recompute: bool = False,
) -> int:
    """Finds the bound that a plan for this has (`plan`, with the same limit and `recompute`), without making
    the plan. It is the same number, unless the time ends the search for it, or a plan meets the simple bound
    at once: then the two are within a thousandth of each other."""
    budget_bytes = min([budget_bytes, *(t.capacity_bytes for t in machine.tiers if t.name == DEVICE)])
    problem = build_problem(profile, machine)
    refuse_budget_below_floor(problem, budget_bytes)
    joint_bound = (
        joint_recompute.bound_with_recompute(problem, machine, budget_bytes, time_limit_s)
        if recompute
        else None
    )
    if joint_bound is None:
        joint_bound = lower_bound(problem, machine, budget_bytes, time_limit_s=BOUND_SHARE * time_limit_s)
    return joint_bound.step_ns


def tensors_to_recompute(
    profile: Profile, machine: Machine, budget_bytes: int, *, time_limit_s: float = 10.0
) -> tuple[str, ...]:
    """What a plan with `recompute` would make again, without the rest of the plan: for a run, which measures
    the step that this makes."""
    problem = build_problem(profile, machine)
    refuse_budget_below_floor(problem, budget_bytes)
    choice = joint_recompute.choose_tensors_to_recompute(
        problem, machine, budget_bytes, (), time_limit_s, SPARE
    )
    return () if choice is None else choice.names


def _plan_and_bound(
    problem: Problem,
    machine: Machine,
    budget_bytes: int,
    planner: str,
    seed: int,
    time_limit_s: float,
    steps: int,
) -> tuple[Plan, int]:
    """The plan and the bound."""
    begun, bound_ns = monotonic(), simple_bound_ns(problem, budget_bytes)
    remember_bound_for_progress(bound_ns)
    if planner == "auto":
        period_ns, made = quick_greedy_plan(problem, machine, budget_bytes, bound_ns)
        if period_ns <= bound_ns * CLOSE:
            return made, bound_ns
        if steps:
            time_limit_s = min(time_limit_s, steps * (period_ns - bound_ns) / 1e9)
    stop = begun + time_limit_s
    lower = lower_bound(problem, machine, budget_bytes, time_limit_s=BOUND_SHARE * time_limit_s)
    remember_bound_for_progress(lower.step_ns)
    tell_progress("")
    problem = replace(problem, stalls_ns=lower.stalls_ns, away=lower.away, towards=lower.towards)
    left_s = stop - monotonic()
    make = PLANNERS[planner]
    made = make(problem, machine, budget_bytes, bound_ns=lower.step_ns, seed=seed, time_limit_s=left_s)
    return made, lower.step_ns


def predicted_step_ns(made: Plan, profile: Profile, machine: Machine) -> int:
    """How long a step takes: by events where links share a bandwidth, which the recurrence does not know."""
    if event_simulation.has_contended_links(machine):
        return event_simulation.simulate_by_events(made, profile, machine).step_ns
    return step_ns(made, profile, machine)
