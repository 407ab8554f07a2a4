"""A verdict on one step: whether the default planner keeps its promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import mean

from random_cases import Case

from teraio.errors import PlanError
from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.passes.planner.bound.certificate import solve_relaxation
from teraio.passes.planner.bound.relaxation import build_relaxation
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import build_problem
from teraio.passes.planner.simulate import event_simulation

PUBLISHED = ("zero-infinity", "g10", "teraio-paper", "10cache")
SHARES = (0.1, 0.2)
JITTER_STEPS, SETTLING = 20, 10


@dataclass(slots=True)
class Verdict:
    """The verdict on one case.

    wrong     broken promises
    fluid     True if the planner found no plan, although the relaxation (a linear program) fits the budget
    slower    relative excess of the step time over the best published system's, if one had a plan
    jitter    (share, by step) -> mean relative slowdown of a step
    """

    case: str
    wrong: list[str] = field(default_factory=list)
    refused: str = ""
    fluid: bool = False
    step_ns: int = 0
    bound_ns: int = 0
    slower: float | None = None
    jitter: dict[tuple[float, bool], float] = field(default_factory=dict)


def judge(case: Case, limit_s: float, seeds: int) -> Verdict:
    verdict = Verdict(case.name)
    profile, machine, budget = case.profile, case.machine, case.budget_bytes
    try:
        made = plan(profile, machine, budget, time_limit_s=limit_s)
    except PlanError as error:
        verdict.refused = str(error)
        verdict.fluid = may_fit(case)
        if "not proven" in verdict.refused:
            verdict.wrong.append(verdict.refused)
        return verdict
    checked = check_plan_against_profile(made, profile, machine)
    if not checked.feasible or checked.peak_bytes > budget:
        verdict.wrong.append(f"the check refuses the plan: {checked}")
    verdict.step_ns, verdict.bound_ns = made.predicted.step_ns, made.predicted.bound_ns
    if event_simulation.simulate_by_events(made, profile, machine).step_ns != made.predicted.step_ns:
        verdict.wrong.append("two simulators disagree")
    if verdict.bound_ns > verdict.step_ns:
        verdict.wrong.append("the bound is above the plan")
    _beside_published(case, verdict, limit_s)
    _shaken(case, made, verdict, seeds)
    return verdict


def may_fit(case: Case) -> bool:
    """Return True if the problem's relaxation, a linear program, fits the budget. The relaxation checks
    memory before every kernel.
    """
    problem = build_problem(case.profile, case.machine)
    if int(problem.floor.max()) > case.budget_bytes or not problem.routes:
        return False
    ticks = range(len(problem.live))
    relaxation = build_relaxation(problem, dict(case.machine.shared), case.budget_bytes, list(ticks))
    return solve_relaxation(relaxation.rows, 60.0) is not None


def _beside_published(case: Case, verdict: Verdict, limit_s: float) -> None:
    for name in PUBLISHED:
        try:
            theirs = plan(case.profile, case.machine, case.budget_bytes, planner=name, time_limit_s=limit_s)
        except PlanError:
            continue
        step_ns = theirs.predicted.step_ns
        if step_ns < verdict.bound_ns:
            verdict.wrong.append(f"the bound is above the plan of {name}")
        slower = verdict.step_ns / max(step_ns, 1) - 1
        verdict.slower = slower if verdict.slower is None else max(verdict.slower, slower)
        if step_ns < verdict.step_ns:
            verdict.wrong.append(f"{name} is faster: {step_ns} ns, not {verdict.step_ns}")


def _shaken(case: Case, made: Plan, verdict: Verdict, seeds: int) -> None:
    if not verdict.step_ns:
        return
    still = event_simulation.simulate_by_events(
        made, case.profile, case.machine, jitter=event_simulation.Jitter(0.0), steps=JITTER_STEPS
    )
    plain_ns = mean(still.took_ns[SETTLING:])
    for share in SHARES:
        for by_step in (False, True):
            took: list[int] = []
            for seed in range(seeds):
                jitter = event_simulation.Jitter(share, seed, by_step)
                try:
                    run = event_simulation.simulate_by_events(
                        made, case.profile, case.machine, jitter=jitter, steps=JITTER_STEPS
                    )
                except PlanError as error:
                    verdict.wrong.append(f"jitter of {share:.0%}: {error}")
                    return
                took += run.took_ns[SETTLING:]
            verdict.jitter[share, by_step] = mean(took) / plain_ns - 1
