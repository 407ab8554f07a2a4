"""The entry points of planning. In: a profile, a machine, a budget. Out: a plan with its bound and its
predicted step.

    plan(profile, machine, budget_bytes)     -> a plan that plan_check has accepted, with its predicted step
    tensors_to_recompute(profile, ...)       -> the tensors that `plan(..., recompute=True)` would recompute
    updates_to_run_late(profile, ...)        -> the weights that `plan(..., updates="auto")` updates late
    updates_to_place(profile, ...)           -> the weights that `plan(..., updates="backward")` updates late,
                                                and those that it updates in the backward
    bound_ns(profile, machine, budget_bytes) -> the lower bound on the step time, without making a plan

The planner `auto` runs `greedy`, `search` and `ilp` one after another. The planner `none` makes a plan
without moves, so that the engine fetches and evicts on demand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from time import monotonic
from typing import Protocol

from teraio.errors import OptionError, PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, Predicted
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.formats.recompute import profile_with_recomputation
from teraio.formats.updates import (
    PLACEMENTS,
    find_backward_updates,
    find_updates,
    profile_with_updates,
    weights_of,
)
from teraio.progress import tell_progress

from .auto import CLOSE, plan_by_planners_in_turn, quick_greedy_plan
from .bound.bound import lower_bound, simple_bound_ns
from .bound.placements import lower_bound_of_placements_ns
from .endurance import plan_within_write_cap
from .exact.ilp import ilp
from .greedy.greedy import greedy
from .joint_recompute import RecomputeChoice, bound_with_recompute, choose_tensors_to_recompute
from .problem.problem import DEVICE, Problem, build_problem, refuse_budget_below_floor
from .problem.progress_lines import remember_bound_for_progress
from .published.g10 import g10
from .published.tencache import tencache
from .published.teraio_paper import teraio_paper
from .published.zero_infinity import zero_infinity
from .search.search import search
from .simulate.simulate import step_ns
from .update_choice import choose_late_updates, choose_updates_to_place


class Planner(Protocol):
    """The signature of a planner. It returns a plan: moves of tensors, and the tiers of evicted tensors
    between steps.
    """

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
    """Return a plan without moves, so that the engine fetches and evicts on demand."""
    return Plan("", "none", budget_bytes)


LEAST_S = 0.1  # least time limit for a plan, even if the choice of tensors to recompute took longer
# Part of the budget that kernels of a step with recomputation must leave free, because their memory is only
# an estimate.
SPARE = 0.1
RECOMPUTE_SHARE = 0.5  # share of the time limit for the tensors to recompute, if updates may be late, too
PLACEMENTS_SHARE = 0.2  # share of the time limit for the bound of all placements of updates
BOUND_SHARE = 0.25  # the bound's share of the time limit; on steps of Llama 8B the bound takes 2 to 4 s

PLANNERS: dict[str, Planner] = {
    "auto": plan_by_planners_in_turn,
    "greedy": greedy,
    "ilp": ilp,
    "none": plan_without_moves,
    "search": search,
    # Planners of published systems, for comparison. Each planner's file names the source of its rules.
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
    updates: str = "step",
    write_per_day_bytes: int = 0,
) -> Plan:
    """Make a plan, check it and predict its step.

    A budget above the device's capacity is reduced to the capacity.

        steps                  limit for the time of `auto`: the time that a better plan could save in
                               this number of steps; 0: no limit
        keep                   names of tensors that never move. Inputs never move either
        recompute              True: the plan may recompute tensors. Its ticks and its predicted step then
                               include the kernels that run again (formats/recompute.py)
        updates                "step": the order of kernels is that of the profile; "late": updates of
                               weights run in the next step, if they can (formats/updates.py); "auto": only
                               updates for which this is faster; "backward": updates run in the backward,
                               late, or at the end of the step. With "auto" and "backward", the bound of the
                               plan holds for any updates at these places; otherwise it is for the order of
                               kernels. With `recompute`, the tensors to recompute are chosen first
        write_per_day_bytes    limit for the bytes written to SSDs in a day. The predicted step is long enough
                               for this limit

    Raise PlanError if no plan exists. The error names the kernel that needs more than the budget, or the slow
    tiers that cannot hold the tensors to evict.

    The planner `none` gives no guarantee about memory. Its plan is returned even if plan_check refuses the
    plan. The prediction of a refused plan has only the bound: step and peak are 0.
    """
    if planner not in PLANNERS:
        raise OptionError(f"planner={planner!r} is unknown; there are {', '.join(sorted(PLANNERS))}")
    if updates not in PLACEMENTS:
        raise OptionError(f"updates={updates!r} is unknown; there are {', '.join(PLACEMENTS)}")
    budget_bytes = min([budget_bytes, *(t.capacity_bytes for t in machine.tiers if t.name == DEVICE)])
    begun, chosen = monotonic(), _Changes()
    if updates == "late":
        chosen = _Changes(weights_of(find_updates(profile)))
    elif updates != "step":
        given = profile, machine, budget_bytes, keep, time_limit_s
        chosen = _choose_changes(*given, recompute and planner != "none", updates == "backward")
    ordered = profile_with_updates(profile, chosen.late, chosen.backward)
    refuse_budget_below_floor(build_problem(ordered, machine, keep), budget_bytes)
    time_limit_s = max(time_limit_s - (monotonic() - begun), LEAST_S)

    request = _Request(
        *(profile, chosen, budget_bytes, planner, fingerprint, seed, time_limit_s, steps, keep), recompute
    )
    made = _plan_within_write_cap(request, machine, write_per_day_bytes)
    bound = chosen.bound_ns
    return made if bound is None else replace(made, predicted=replace(made.predicted, bound_ns=bound))


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changes of the step that are chosen before planning.

    late         weights whose updates run late
    backward     weights whose updates run in the backward
    recompute    the tensors to recompute, if they are chosen already
    bound_ns     a bound that holds for any such changes; None if the places of updates were given
    """

    late: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()
    recompute: RecomputeChoice | None = None
    bound_ns: int | None = None


def _choose_changes(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    keep: Collection[str],
    time_limit_s: float,
    recompute: bool,
    backward: bool,
) -> _Changes:
    """Choose tensors to recompute, and places of updates for the step with these tensors."""
    choice, step = None, profile
    if recompute:
        early = weights_of(find_backward_updates(profile)) if backward else ()
        problem = build_problem(profile_with_updates(profile, backward=early), machine, keep)
        if int(problem.floor.max()) > budget_bytes:
            problem = build_problem(profile, machine, keep)
        limit_s = RECOMPUTE_SHARE * time_limit_s
        choice = choose_tensors_to_recompute(problem, machine, budget_bytes, keep, limit_s)
    if choice is not None:
        step = profile_with_recomputation(profile, choice.names)
    given = step, machine, budget_bytes, keep, time_limit_s
    places = choose_updates_to_place(*given) if backward else (choose_late_updates(*given), ())
    limit_s = PLACEMENTS_SHARE * time_limit_s
    bound = lower_bound_of_placements_ns(profile, machine, budget_bytes, keep, limit_s, recompute, backward)
    return _Changes(*places, choice, bound)


@dataclass(frozen=True, slots=True)
class _Request:
    """The arguments of `plan`, except the machine and the limit for writes, and the changes of the step."""

    profile: Profile
    chosen: _Changes
    budget_bytes: int
    planner: str
    fingerprint: str
    seed: int
    time_limit_s: float
    steps: int
    keep: Collection[str]
    recompute: bool

    def step_with(self, recompute: Collection[str]) -> Profile:
        """Return the profile of the step that recomputes these tensors, and updates at the chosen places."""
        step = profile_with_recomputation(self.profile, recompute)
        return profile_with_updates(step, self.chosen.late, self.chosen.backward)


def _plan_within_write_cap(request: _Request, machine: Machine, write_per_day_bytes: int) -> Plan:
    if not write_per_day_bytes:
        return _plan_on_machine(request, machine, machine, 1.0)
    return plan_within_write_cap(
        lambda on, share: _plan_on_machine(request, machine, on, share),
        request.profile,
        machine,
        write_per_day_bytes,
    )


def _plan_on_machine(request: _Request, machine: Machine, on: Machine, share: float) -> Plan:
    """Make a plan for the machine `on`, in this share of the time limit. Predict the plan's step on
    `machine`.
    """
    budget_bytes, planner, choice = request.budget_bytes, request.planner, request.chosen.recompute
    step = request.step_with(())
    problem = build_problem(step, on, request.keep)
    limit_s = share * request.time_limit_s
    stop = monotonic() + limit_s
    if choice is None and request.recompute and planner != "none":
        choice = choose_tensors_to_recompute(problem, on, budget_bytes, request.keep, limit_s)
    if choice is not None and choice.names:
        step = request.step_with(choice.names)
        problem = build_problem(step, on, request.keep)
    begun, made = monotonic(), None
    limit_s = max(stop - begun, LEAST_S)
    bound_ns = simple_bound_ns(problem, budget_bytes)
    remember_bound_for_progress(bound_ns)
    if planner == "auto":
        period_ns, quick = quick_greedy_plan(problem, on, budget_bytes, bound_ns)
        if period_ns <= bound_ns * CLOSE:
            made = quick
        elif request.steps:
            limit_s = min(limit_s, request.steps * (period_ns - bound_ns) / 1e9)
    if made is None:
        problem, bound_ns = _problem_with_bound(problem, on, budget_bytes, limit_s)
        made = PLANNERS[planner](
            problem,
            on,
            budget_bytes,
            bound_ns=bound_ns,
            seed=request.seed,
            time_limit_s=begun + limit_s - monotonic(),
        )
    if choice is not None:
        bound_ns = choice.bound_ns
    names = choice.names if choice is not None else ()
    made = replace(made, fingerprint=request.fingerprint, planner=planner, recompute=names)
    made = replace(made, late=request.chosen.late, backward=request.chosen.backward)
    return _check_plan_and_add_prediction(made, request.profile, step, machine, bound_ns)


def _problem_with_bound(
    problem: Problem, machine: Machine, budget_bytes: int, limit_s: float
) -> tuple[Problem, int]:
    """Compute the lower bound on the step time. Return a pair: the problem with hints from this computation,
    and the bound.
    """
    lower = lower_bound(problem, machine, budget_bytes, time_limit_s=BOUND_SHARE * limit_s)
    remember_bound_for_progress(lower.step_ns)
    tell_progress("")
    return lower.add_hints(problem), lower.step_ns


def _check_plan_and_add_prediction(
    made: Plan, profile: Profile, step: Profile, machine: Machine, bound_ns: int
) -> Plan:
    """Check the plan, and return it with its predicted step. `step` is the profile with the kernels that run
    again.
    """
    verdict = check_plan_against_profile(made, profile, machine)
    if not verdict.feasible and made.planner == "none":
        return replace(made, predicted=Predicted(0, bound_ns, 0))
    if not verdict.feasible:
        raise PlanError(f"the check refuses the plan of planner {made.planner!r}: {verdict.problems[0]}")
    return replace(made, predicted=Predicted(step_ns(made, step, machine), bound_ns, verdict.peak_bytes))


def bound_ns(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    *,
    time_limit_s: float = 10.0,
    recompute: bool = False,
) -> int:
    """Return the bound that `plan` would return for the same arguments, without making the plan.

    The result can differ from the bound of `plan` in two cases. (1) The time limit may end the search for the
    bound early. (2) `plan` stops early if a first plan of greedy meets the simple bound, and then returns the
    simple bound. In case (2) the bounds differ by at most a thousandth.
    """
    budget_bytes = min([budget_bytes, *(t.capacity_bytes for t in machine.tiers if t.name == DEVICE)])
    problem = build_problem(profile, machine)
    refuse_budget_below_floor(problem, budget_bytes)
    joint_bound = bound_with_recompute(problem, machine, budget_bytes, time_limit_s) if recompute else None
    if joint_bound is None:
        joint_bound = lower_bound(problem, machine, budget_bytes, time_limit_s=BOUND_SHARE * time_limit_s)
    return joint_bound.step_ns


def updates_to_run_late(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    *,
    keep: Collection[str] = (),
    time_limit_s: float = 10.0,
) -> tuple[str, ...]:
    """Return the names of the weights whose updates a plan with `updates="auto"` runs late, without making
    the plan.

    A run calls this function before it plans. It then runs these updates late, and measures the new step.
    """
    refuse_budget_below_floor(build_problem(profile, machine, keep), budget_bytes)
    return choose_late_updates(profile, machine, budget_bytes, keep, time_limit_s)


def updates_to_place(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    *,
    keep: Collection[str] = (),
    time_limit_s: float = 10.0,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the places of updates in a plan with `updates="backward"`, without making the plan. The first
    names are the weights that are updated late, and the others the weights that are updated in the backward.
    """
    refuse_budget_below_floor(build_problem(profile, machine, keep), budget_bytes)
    return choose_updates_to_place(profile, machine, budget_bytes, keep, time_limit_s)


def tensors_to_recompute(
    profile: Profile, machine: Machine, budget_bytes: int, *, time_limit_s: float = 10.0
) -> tuple[str, ...]:
    """Return the names of the tensors that a plan with `recompute` would recompute, without making the plan.

    A run with recomputation calls this function before it plans. The run then compiles the step with these
    tensors recomputed, and measures the new step.
    """
    problem = build_problem(profile, machine)
    refuse_budget_below_floor(problem, budget_bytes)
    choice = choose_tensors_to_recompute(problem, machine, budget_bytes, (), time_limit_s, SPARE)
    return () if choice is None else choice.names
