"""Planners: a profile, a machine and a budget in, a plan out.

    plan(profile, machine, budget_bytes)     -> a plan that `check` has accepted, with its predicted step time
    smallest_budget(profile)                 -> the budget below which there is none
    simulate(plan, profile, machine)         -> its predicted timeline

`auto` is `greedy`. `none` decides nothing: its plan has no moves, the engine fetches and evicts on demand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from teraio.check import check
from teraio.errors import OptionError, PlanError
from teraio.machine import Machine
from teraio.plan import Plan, Predicted
from teraio.profile import Profile

from .greedy import greedy
from .problem import DEVICE, Problem, build, refuse_below_floor, smallest_budget
from .simulate import simulate, step_ns

__all__ = ["PLANNERS", "lower_bound_ns", "plan", "simulate", "smallest_budget"]


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


def none(
    problem: Problem, machine: Machine, budget_bytes: int, *, bound_ns: int, seed: int, time_limit_s: float
) -> Plan:
    """No moves: everything happens on demand."""
    return Plan("", "none", budget_bytes)


PLANNERS: dict[str, Planner] = {"auto": greedy, "greedy": greedy, "none": none}


def plan(
    profile: Profile,
    machine: Machine,
    budget_bytes: int,
    *,
    planner: str = "auto",
    fingerprint: str = "",
    seed: int = 0,
    time_limit_s: float = 10.0,
    keep: Collection[str] = (),
) -> Plan:
    """Make a plan, check it, predict it. Tensors in `keep` and inputs stay where they are. A budget beyond
    the device's capacity is cut down to it.

    Raises PlanError with the certificate if there is no plan: the kernel whose working set exceeds the
    budget, or the tiers that cannot hold what must be away. A plan of `none` promises nothing about memory,
    so it is the only one that the check may refuse; then only the bound is predicted (step and peak are 0).
    """
    if planner not in PLANNERS:
        raise OptionError(f"planner={planner!r} is unknown; there are {', '.join(sorted(PLANNERS))}")
    budget_bytes = min([budget_bytes, *(t.capacity_bytes for t in machine.tiers if t.name == DEVICE)])
    problem = build(profile, machine, keep)
    refuse_below_floor(problem, budget_bytes)
    bound_ns = lower_bound_ns(problem, budget_bytes)
    made = PLANNERS[planner](
        problem, machine, budget_bytes, bound_ns=bound_ns, seed=seed, time_limit_s=time_limit_s
    )
    made = replace(made, fingerprint=fingerprint, planner=planner)
    verdict = check(made, profile, machine)
    if not verdict.feasible and planner == "none":
        return replace(made, predicted=Predicted(0, bound_ns, 0))
    if not verdict.feasible:
        raise PlanError(f"planner {planner!r} made a plan that the check refuses: {verdict.problems[0]}")
    return replace(made, predicted=Predicted(step_ns(made, profile, machine), bound_ns, verdict.peak_bytes))


def lower_bound_ns(problem: Problem, budget_bytes: int) -> int:
    """A true bound on the step time of any plan that keeps this budget, simple and not tight.

    Compute: kernels run one after another. Bytes: at every tick, what lives beyond the budget is away; all of
    it is used again (unused tensors are left out), so it is fetched once per step or more, over all links.
    """
    compute_ns = sum(kernel.duration_ns for kernel in problem.profile.kernels)
    unused = sum(gap.size_bytes for gap in problem.gaps if gap.unused)
    forced_bytes = int(problem.live.max()) - unused - budget_bytes
    rate = sum(route.back.bandwidth_bytes_per_s for route in problem.routes)
    return max(compute_ns, -(-forced_bytes * 1_000_000_000 // rate) if forced_bytes > 0 and rate else 0)
