"""Which plan a measured step gets.

a plan file           if it is for this step
a new one             by the planner that the options name, as good as pays back
none, for now         if tensors are made again in it: it is compiled anew first, and measured; or if the
                      optimizer steps elsewhere from now on
"""

from __future__ import annotations

import logging
from dataclasses import replace

from teraio.errors import TeraioError
from teraio.formats.machine import Machine
from teraio.formats.moves_by_kernel import plan_listing
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step
from teraio.options import Settings
from teraio.passes.planner import planners
from teraio.passes.planner.problem import problem
from teraio.passes.slots import lifetimes
from teraio.progress import show_stage
from teraio.runtime.engine.engine import Engine
from teraio.session.host_choice import HostChoice
from teraio.session.log_lines import add_trace_artifact, describe_plan
from teraio.session.plan_reuse import EarlierPlans
from teraio.session.recomputation import Recomputation
from teraio.units import fmt_bytes, fmt_count

log = logging.getLogger("teraio")

PAYS_BACK_STEPS = 250  # of a training: planning takes no longer than it can save in so many


class Planning:
    def __init__(
        self,
        options: Settings,
        machine: Machine,
        engine: Engine,
        earlier: EarlierPlans,
        remaking: Recomputation,
    ) -> None:
        self.options, self.machine, self.engine = options, machine, engine
        self.earlier, self.remaking = earlier, remaking
        is_open = options.optimizer_step == "auto" and options.planner != "none"
        self.host_choice = HostChoice(engine, machine, is_open)

    @property
    def budget_bytes(self) -> int:
        return self.engine.residency.budget_bytes

    def recompute_by_plan_file(self, step: Step) -> bool:
        """A plan file that names tensors to be made again was made for a step that does not: of this file
        only the names count, and the step that then runs gets a plan of its own."""
        replay = self.earlier.replay
        if replay is None or not replay.recompute:
            return False
        if replay.fingerprint != fingerprint_of_profile(lifetimes.profile_of_steps([step], "run")):
            return False
        self.earlier.replay = None
        return self.remaking.mark_tensors_for_recompute(step, replay.recompute)

    def choose_plan(self, profile: Profile, step: Step) -> Plan | None:
        """The plan file if it is for this step, else a new plan; None: on demand, said why, or because the
        step is compiled anew first."""
        fingerprint, replay = fingerprint_of_profile(profile), self.earlier.replay
        if replay is not None:
            if replay.fingerprint == fingerprint:
                log.info("teraio: replaying %s: %s", self.options.plan, fmt_count(len(replay.moves), "move"))
                return replay
            log.warning(
                "teraio: %s is a plan for another step (fingerprint %s, this one has %s): not used, tensors "
                "are moved on demand",
                self.options.plan,
                replay.fingerprint,
                fingerprint,
            )
            return None
        if self.engine.residency.elastic:
            smallest = max(self.budget_bytes, problem.smallest_budget(profile))
            self.engine.residency.budget_bytes = smallest
            log.info("teraio: memory is %s, the smallest for this step", fmt_bytes(smallest, up=True))
        try:
            plan = self._make_new_plan(
                cut_workspaces_to_budget(profile, self.budget_bytes), step, fingerprint
            )
        except TeraioError as error:
            log.warning("teraio: no plan, tensors are moved on demand: %s", error)
            return None
        if plan is None:
            return None
        if plan.planner == "none":
            log.info("teraio: no plan was asked for: tensors are moved on demand")
            return plan
        log.info("teraio: %s", describe_plan(plan, profile))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("teraio: %s", plan_listing(plan, [kernel.name for kernel in profile.kernels]))
        add_trace_artifact("teraio_profile", profile.dumps)
        add_trace_artifact("teraio_plan", plan.dumps)
        self.earlier.save_plan(plan)
        return plan

    def _make_new_plan(self, profile: Profile, step: Step, fingerprint: str) -> Plan | None:
        """None: another step than this one runs from now on."""
        if self.remaking.is_recompute_undecided(step) and self.options.planner != "none":
            limit_s = self.options.plan_time / 1e9
            with show_stage("choosing what to make again", limit_s=limit_s, say=log.info):
                names = planners.tensors_to_recompute(
                    profile, self.machine, self.budget_bytes, time_limit_s=limit_s
                )
            if self.remaking.mark_tensors_for_recompute(step, names):
                return None
        plan = self._run_planner(profile, fingerprint)
        if self.host_choice.switch_if_faster(profile, step, plan, lambda other: self._run_planner(other, "")):
            return None
        return replace(plan, remade=self.remaking.recomputed_nodes_of(step))

    def _run_planner(self, profile: Profile, fingerprint: str) -> Plan:
        limit_s = self.options.plan_time / 1e9
        with show_stage(f"planning by {self.options.planner}", limit_s=limit_s, say=log.info):
            return planners.plan(
                profile,
                self.machine,
                self.budget_bytes,
                planner=self.options.planner,
                fingerprint=fingerprint,
                time_limit_s=limit_s,
                steps=PAYS_BACK_STEPS,
                write_per_day_bytes=self.options.max_write_per_day or 0,
            )


def cut_workspaces_to_budget(profile: Profile, budget_bytes: int) -> Profile:
    """User code that needs more than there is gets it, which is said: a plan then makes all the room that it
    can. Programs end with a kernel of their own, at which such bytes are counted."""
    over = problem.build_problem(profile).floor - budget_bytes
    last = {kernel.call: tick for tick, kernel in enumerate(profile.kernels)}
    kernels = list(profile.kernels)
    for tick in last.values():
        if over[tick] > 0:
            less = max(0, kernels[tick].workspace_bytes - int(over[tick]))
            kernels[tick] = replace(kernels[tick], workspace_bytes=less)
    return replace(profile, kernels=tuple(kernels))
