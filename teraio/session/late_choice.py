"""The choice of updates that run late, with the option `updates="auto"`.

A run tries late updates only after its steps follow a plan. Then it compares measured durations of both kinds
of steps, the steps with all updates at `step()`, and the steps with some updates in the next forward:

    WAITING     no step follows a plan yet
    PLANNING    the planner chooses late updates and makes a plan with them; steps go on
    BEFORE      steps with all updates at `step()` are timed
    CHANGING    the updates run late; the first such steps are measured, and their plan gets its trial
    AFTER       steps with late updates are timed
    DECIDED     if the steps with late updates were slower, all updates run at `step()` again

The decision is saved in the plan cache. So a later run of the same training begins with the better kind. A
plan file with late updates makes the decision, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from statistics import median

from teraio.errors import PlanError, TeraioError
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step
from teraio.formats.updates import find_updates, profile_with_updates
from teraio.runtime.engine.engine import Engine
from teraio.session.course import Course, Order, Phase
from teraio.session.plan_choice import Choice, Work
from teraio.session.plan_reuse import EarlierPlans
from teraio.session.planning import Planning, cut_workspaces_to_budget
from teraio.units import fmt_count, fmt_ns

log = logging.getLogger("teraio")

TIMED_STEPS = 3  # steps of each kind whose durations are compared, by their median
PATIENCE_STEPS = 64  # after so many other steps, the comparison ends without a result
WORTH_PERCENT = 1  # if the plan with late updates is not faster by this, it is not tried


class Stage(Enum):
    """The states of the choice."""

    WAITING = "waiting"
    PLANNING = "planning"
    BEFORE = "before"
    CHANGING = "changing"
    AFTER = "after"
    DECIDED = "decided"


class LateChoice:
    """The choice of late updates in one run. The session makes it once, and again after `set_memory`."""

    def __init__(self, planning: Planning, earlier: EarlierPlans, engine: Engine) -> None:
        options = planning.options
        self.planning, self.earlier, self.engine = planning, earlier, engine
        is_open = options.updates == "auto" and options.planner != "none" and not options.profile
        self.stage = Stage.WAITING if is_open and earlier.replay is None else Stage.DECIDED
        self.is_open = is_open  # False: the option `updates` has made the choice
        self.choice: Choice | None = None
        self.plan: Plan | None = None  # the plan with late updates
        self.unfit: set[Order] = set()  # kinds of steps in which no update can run late
        self.order: Order = ()  # the programs of the steps that are timed now
        self.fingerprint = ""  # of the step with all updates at `step()`
        self.times_ns: list[int] = []
        self.before_ns = 0  # median duration of the steps with all updates at `step()`
        self.waited = 0  # steps since the stage began that were not timed
        self.late_updates = 0  # count of late updates at the end of the last step

    @property
    def is_running(self) -> bool:
        """Return True while late updates are planned, or steps are compared."""
        return self.stage not in (Stage.WAITING, Stage.DECIDED)

    def restart(self) -> None:
        """Make the choice again, because `set_memory` has changed the budget."""
        self.cancel()
        if self.is_open:
            self.engine.late.choose(())
            self._enter(Stage.WAITING)

    def cancel(self) -> None:
        """End the planner's work on this choice."""
        choice, self.choice = self.choice, None
        if choice is not None:
            choice.cancel()
            self._enter(Stage.DECIDED)

    # ---- plans of earlier runs

    def follow_earlier_decision(self, profile: Profile, fingerprint: str) -> bool:
        """Run the updates late that a plan file, or an earlier run of this training, runs late after a step
        with this profile. Return True if this changes the next steps."""
        replay = self.earlier.replay
        if replay is not None and (replay.late or replay.backward):
            return replay.fingerprint == fingerprint and self._follow_plan_file(replay, profile)
        if self.stage is not Stage.WAITING:
            return False
        names = self.earlier.late_updates_after(fingerprint)
        if names is not None:
            self._enter(Stage.DECIDED)
        if names:
            log.info("teraio: %s: an earlier run was faster so", _describe(names))
            self.engine.late.choose(names)
        return bool(names)

    def _follow_plan_file(self, replay: Plan, profile: Profile) -> bool:
        try:
            step = profile_with_updates(profile, replay.late, replay.backward)
        except PlanError as error:
            log.warning("teraio: the updates of %s: %s", self.planning.options.plan, error)
            return False
        what = _describe(replay.late, replay.backward)
        log.info("teraio: %s, as in %s", what, self.planning.options.plan)
        self.engine.late.choose(replay.late)
        self.engine.late.backward.choose(replay.backward)
        fingerprint = fingerprint_of_profile(step)
        self.earlier.change_replay(replace(replay, fingerprint=fingerprint, late=(), backward=()))
        return True

    # ---- the comparison

    def end_step(self, courses: Mapping[Order, Course]) -> None:
        """Advance the choice after a step."""
        if self.stage is Stage.DECIDED:
            return
        course = courses.get(self.engine.tracker.expected.programs)
        was_late = self.engine.mover.counts.late_updates > self.late_updates
        self.late_updates = self.engine.mover.counts.late_updates
        if course is not None and course.phase is Phase.PLANNED:
            self._use_planned_step(course, was_late)
        if self.stage is Stage.PLANNING:
            self._use_plan_if_made()
        elif self.stage in (Stage.BEFORE, Stage.CHANGING, Stage.AFTER) and not self.planning.is_choosing:
            self.waited += 1
            if self.waited > PATIENCE_STEPS:
                log.info("teraio: all updates run at step(): no two kinds of steps could be compared")
                self._decide(())

    def _use_planned_step(self, course: Course, was_late: bool) -> None:
        if self.stage is Stage.WAITING and course.source is not None and not was_late:
            self._begin_planning(course, *course.source)
        elif self.stage is Stage.BEFORE and course.order == self.order:
            if self._time_step():
                self._change(int(median(self.times_ns)))
        elif self.stage is Stage.CHANGING and was_late and len(course.order) == len(self.order):
            self.order = course.order
            self._enter(Stage.AFTER)
        elif self.stage is Stage.AFTER and course.order == self.order and self._time_step():
            self._compare(int(median(self.times_ns)))

    def _begin_planning(self, course: Course, profile: Profile, step: Step) -> None:
        """Ask the planner for late updates, unless no update of this step can run late."""
        expected = self.engine.tracker.expectation_of(course.order)
        if course.order in self.unfit or not expected.table or not expected.predicted:
            return
        if not expected.predicted.step_ns or not find_updates(profile):
            self.unfit.add(course.order)
            return
        self.order, self.fingerprint = course.order, fingerprint_of_profile(profile)
        self.choice = self.planning.choice_of(
            self._plan_with_late_updates(profile, expected.predicted.step_ns)
        )
        self._enter(Stage.PLANNING)

    def _plan_with_late_updates(self, profile: Profile, step_ns: int) -> Work[Plan | None]:
        """Return a plan with the late updates that the planner chooses. Return None if its predicted step is
        not shorter than `step_ns`."""
        try:
            fitting = cut_workspaces_to_budget(profile, self.planning.budget_bytes)
            names = yield self.planning.ask_for_late_updates(fitting)
            if not names:
                return None
            late = profile_with_updates(fitting, names)
            plan: Plan = yield self.planning.ask_for_plan(late, fingerprint_of_profile(late))
        except TeraioError as error:
            log.info("teraio: no plan with late updates: %s", error)
            return None
        if plan.predicted.step_ns * 100 > step_ns * (100 - WORTH_PERCENT):
            return None
        return replace(plan, late=names)

    def _use_plan_if_made(self) -> None:
        assert self.choice is not None
        if not self.planning.advance_choice(self.choice):
            return
        choice, self.choice = self.choice, None
        self.plan = choice.finish()
        if self.plan is None:
            log.info("teraio: all updates run at step(): late updates would not make the step faster")
            self._decide(())
        else:
            self._enter(Stage.BEFORE)

    def _time_step(self) -> bool:
        """Note the duration of the last step. Return whether enough steps are timed."""
        self.times_ns.append(self.engine.meter.step_ns())
        self.waited = 0
        return len(self.times_ns) == TIMED_STEPS

    def _change(self, before_ns: int) -> None:
        """Run the chosen updates late from now on."""
        assert self.plan is not None
        self.before_ns = before_ns
        log.info(
            "teraio: %s from now on: the plan predicts %s a step instead of %s",
            _describe(self.plan.late),
            fmt_ns(self.plan.predicted.step_ns),
            fmt_ns(before_ns),
        )
        self.earlier.expect_plan(replace(self.plan, late=()))
        self.engine.late.choose(self.plan.late)
        self._enter(Stage.CHANGING)

    def _compare(self, after_ns: int) -> None:
        """Compare the durations of both kinds of steps, and keep the faster kind."""
        assert self.plan is not None
        if after_ns > self.before_ns:
            log.info(
                "teraio: all updates run at step() again: with late updates a step took %s, without %s",
                fmt_ns(after_ns),
                fmt_ns(self.before_ns),
            )
            self._decide(())
            return
        log.info(
            "teraio: late updates are kept: a step takes %s, without them %s",
            fmt_ns(after_ns),
            fmt_ns(self.before_ns),
        )
        self._decide(self.plan.late)

    def _decide(self, names: tuple[str, ...]) -> None:
        """End the choice with these late updates, and save it for later runs."""
        self.engine.late.choose(names)
        if names and self.plan is not None:
            self.earlier.save_plan(replace(self.plan, late=()))
        self.earlier.save_late_updates(self.fingerprint, names)
        self.plan = None
        self._enter(Stage.DECIDED)

    def _enter(self, stage: Stage) -> None:
        self.stage, self.times_ns, self.waited = stage, [], 0


def _describe(late: tuple[str, ...], backward: tuple[str, ...] = ()) -> str:
    places = (late, "in the next forward"), (backward, "in the backward")
    return " and ".join(
        f"the updates of {fmt_count(len(names), 'weight')} run {place}" for names, place in places if names
    )
