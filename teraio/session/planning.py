"""The choice of a plan for a measured step.

a plan file           if it was made for this step
a new plan            made by the planner that the options name; planning takes at most the time that the plan
                      can save in PAYS_BACK_STEPS steps
no plan yet           if tensors to recompute, or optimizer buckets for the host, were chosen now; this
                      changes the step, so the changed step is measured before it is planned

Late updates are chosen after this (late_choice.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
from teraio.runtime.engine.engine import Engine
from teraio.session.host_choice import HostChoice
from teraio.session.log_lines import add_trace_artifact, describe_plan
from teraio.session.plan_choice import Ask, Choice, Work
from teraio.session.plan_reuse import EarlierPlans, fingerprint_of_step
from teraio.session.recomputation import Recomputation
from teraio.units import fmt_bytes

log = logging.getLogger("teraio")

PAYS_BACK_STEPS = 250  # planning may take as long as its plan can save in this many steps


class Planning:
    """The choice of plans in one run, with its inputs: options, machine, earlier plans."""

    def __init__(
        self,
        options: Settings,
        machine: Machine,
        engine: Engine,
        earlier: EarlierPlans,
        recomputation: Recomputation,
    ) -> None:
        self.options, self.machine, self.engine = options, machine, engine
        self.earlier, self.recomputation = earlier, recomputation
        is_open = options.optimizer_step == "auto" and options.planner != "none"
        self.host_choice = HostChoice(engine, machine, is_open)
        self.choice: Choice | None = None  # the choice that began last; one process plans at a time

    @property
    def budget_bytes(self) -> int:
        """Return the current budget."""
        return self.engine.residency.budget_bytes

    def recompute_by_plan_file(self, step: Step) -> bool:
        """Begin to recompile if the plan file is for this step and lists tensors to recompute. Return True if
        it does.

        Only the names of these tensors, and of weights that are updated late or in the backward, are used.
        The moves of such a plan do not fit the recompiled step, which gets a new plan.
        """
        replay = self.earlier.replay
        if replay is None or not replay.recompute:
            return False
        if replay.fingerprint != fingerprint_of_step(step):
            return False
        self.earlier.change_replay(None)
        if replay.late or replay.backward:
            self.engine.late.choose(replay.late)
            self.engine.late.backward.choose(replay.backward)
        return self.recomputation.mark_tensors_for_recompute(step, replay.recompute)

    def begin_choice(self, profile: Profile, step: Step) -> Choice:
        """Return a new choice of a plan for this step. It begins when `advance_choice` is first called."""
        profile = self.earlier.collective_waits.with_least_durations(profile)
        return self.choice_of(self.choose_plan(profile, step))

    def choice_of(self, work: Work[Plan | None]) -> Choice:
        """Return a new choice that does this work, in a planner process if the options say so."""
        beside = self.options.planning == "process" and self.options.planner != "none"
        return Choice(work, beside)

    def advance_choice(self, choice: Choice) -> bool:
        """Let a choice use the planner's answer, if there is one. Return True if the choice has ended.

        If another choice has begun and not ended, do nothing.
        """
        if self.is_choosing and self.choice is not choice:
            return False
        self.choice = choice
        return choice.has_ended()

    @property
    def is_choosing(self) -> bool:
        """Return True if a choice has begun and not ended, so that a planner process may be running."""
        choice = self.choice  # `teraio.stats()` may read it in another thread
        return choice is not None and not choice.is_over

    def choose_plan(self, profile: Profile, step: Step) -> Work[Plan | None]:
        """Return the plan of the plan file if it is for this step. If the run has no plan file, ask the
        planner for a plan, and return it.

        Return None in two cases: (1) No plan can be used, and a warning gives the reason. (2) Tensors to
        recompute, or buckets for the host, were chosen. The step changes then, so it needs a plan later.
        """
        fingerprint = fingerprint_of_profile(profile)
        if self.earlier.replay is not None:
            return self._replayed_plan(self.earlier.replay, fingerprint)
        if self.engine.residency.elastic:
            self.engine.residency.grow_budget_to(problem.smallest_budget(profile))
            log.info(
                "teraio: memory is %s, the smallest for this step", fmt_bytes(self.budget_bytes, up=True)
            )
        try:
            fitting = cut_workspaces_to_budget(profile, self.budget_bytes)
            if (yield from self._begin_recomputation(fitting, step)):
                return None
            plan = yield self.ask_for_plan(fitting, fingerprint)
            if (yield from self.host_choice.switch_if_faster(fitting, step, plan, self.ask_for_plan)):
                return None
        except TeraioError as error:
            log.warning("teraio: no plan, tensors are moved on demand: %s", error)
            return None
        plan = replace(plan, remade=self.recomputation.recomputed_nodes_of(step))
        self._report_and_keep(plan, profile)
        return plan

    def ask_for_plan(self, profile: Profile, fingerprint: str = "") -> Ask:
        """Return the ask for a plan of this step."""
        call = partial(
            planners.plan,
            profile,
            self.machine,
            self.budget_bytes,
            planner=self.options.planner,
            fingerprint=fingerprint,
            time_limit_s=self._limit_s,
            steps=PAYS_BACK_STEPS,
            write_per_day_bytes=self.options.max_write_per_day or 0,
        )
        return Ask(f"planning by {self.options.planner}", self._limit_s, call)

    def ask_for_late_updates(self, profile: Profile) -> Ask:
        """Return the ask for the names of the weights whose updates run late."""
        return self._ask_for_names("choosing updates that run late", planners.updates_to_run_late, profile)

    def _ask_for_names(self, what: str, choose: Callable[..., tuple[str, ...]], profile: Profile) -> Ask:
        """Return the ask for the names that this function of the planners chooses."""
        call = partial(choose, profile, self.machine, self.budget_bytes, time_limit_s=self._limit_s)
        return Ask(what, self._limit_s, call)

    @property
    def _limit_s(self) -> float:
        return self.options.plan_time / 1e9

    def _replayed_plan(self, replay: Plan, fingerprint: str) -> Plan | None:
        """Return the plan of the plan file. If it is for another step, log a warning and return None."""
        if (plan := self.earlier.plan_file_for(fingerprint)) is not None:
            return plan
        log.warning(
            "teraio: %s is a plan for another step (fingerprint %s, this one has %s): not used, tensors "
            "are moved on demand",
            self.options.plan,
            replay.fingerprint,
            fingerprint,
        )
        return None

    def _begin_recomputation(self, profile: Profile, step: Step) -> Work[bool]:
        """Choose the tensors that this step recomputes. Return True if programs must then be recompiled."""
        if not self.recomputation.is_recompute_undecided(step) or self.options.planner == "none":
            return False
        names = yield self._ask_for_names(
            "choosing tensors to recompute", planners.tensors_to_recompute, profile
        )
        return self.recomputation.mark_tensors_for_recompute(step, names)

    def _report_and_keep(self, plan: Plan, profile: Profile) -> None:
        """Log a new plan, add it to torch's trace, and save it for later runs. If the planner is `none`, only
        log this.
        """
        if plan.planner == "none":
            log.info("teraio: option 'planner' is 'none': tensors are moved on demand")
            return
        log.info("teraio: %s", describe_plan(plan, profile))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("teraio: %s", plan_listing(plan, [kernel.name for kernel in profile.kernels]))
        add_trace_artifact("teraio_profile", profile.dumps)
        add_trace_artifact("teraio_plan", plan.dumps)
        self.earlier.save_plan(plan)


def cut_workspaces_to_budget(profile: Profile, budget_bytes: int) -> Profile:
    """Return the profile with less user code's memory, so that a plan exists within the budget.

    User code gets all of its memory anyway, and the engine reports the memory beyond the budget as an
    overrun. Where there is an overrun, the plan evicts every tensor that it can evict. The workspace of a
    call's last kernel contains the memory that user code allocates after the call.
    """
    over = problem.build_problem(profile).floor - budget_bytes
    last = {kernel.call: tick for tick, kernel in enumerate(profile.kernels)}
    kernels = list(profile.kernels)
    for tick in last.values():
        if over[tick] > 0:
            less = max(0, kernels[tick].workspace_bytes - int(over[tick]))
            kernels[tick] = replace(kernels[tick], workspace_bytes=less)
    return replace(profile, kernels=tuple(kernels))
