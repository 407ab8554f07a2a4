"""The course of one kind of step: from its first measurement to a plan.

A kind of step is an order of programs: the programs that the step runs, in order.

    MEASURING    the engine measures steps; they move tensors on demand, or follow a plan that drifted
        |  enough steps are measured                        if an earlier run has a plan: TRIAL
        v
    PLANNING     the planner works, in its own process; steps go on as in MEASURING
        |  the planner has made a plan
        v
    TRIAL        steps follow the plan; the second step is compared with the plan's prediction
        |  the second step takes as long as predicted       if it does not: MEASURING again
        v
    PLANNED      steps follow the plan, or move tensors on demand until the end; no step is measured

If a plan recomputes tensors, Dynamo compiles programs again. Meanwhile the session is RECOMPILING, and
ignores measured steps. After this, the steps run other programs, so they have a course of their own.

Only the methods of a course change the course.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step
from teraio.session.plan_choice import Choice

Order = tuple[str, ...]  # the hashes of a step's programs, in the order of their calls

TRIAL_STEPS = 2  # the first step does not count: at its start, tensors are not yet in the tiers of the plan


class Phase(Enum):
    """The states of a course. RECOMPILING is a state of the whole session instead."""

    MEASURING = "measuring"
    PLANNING = "planning"
    TRIAL = "trial"
    PLANNED = "planned"
    RECOMPILING = "recompiling"


@dataclass(slots=True)
class Course:
    """The state of one kind of step (order of programs): its phase, its measured steps, and the plan on
    trial.
    """

    order: Order
    phase: Phase = Phase.MEASURING
    steps: list[Step] = field(default_factory=list)  # steps measured in the current phase
    choice: Choice | None = None  # the choice of a plan that is being made, or None
    plan: Plan | None = None  # the plan on trial, or None
    was_tried: bool = False  # if True, the next plan gets no trial
    # The profile and the step from which the last plan was made, or that have tried a plan of an earlier run.
    source: tuple[Profile, Step] | None = None

    def add_step(self, step: Step) -> int:
        """Add a measured step. Return how many measured steps the course has now."""
        self.steps.append(step)
        return len(self.steps)

    def take_steps(self) -> list[Step]:
        """Return the measured steps, and empty the list."""
        steps, self.steps = self.steps, []
        return steps

    def begin_planning(self, choice: Choice, profile: Profile, step: Step) -> None:
        """Enter the phase PLANNING. Keep the profile and the step from which the plan is made.

        `set_memory` uses both to make a plan for another budget.
        """
        self.phase, self.choice, self.source = Phase.PLANNING, choice, (profile, step)

    def note_source(self, profile: Profile, step: Step) -> None:
        """Keep the profile and the step of a trial. The plan on trial was made by an earlier run."""
        self.source = profile, step

    def end_planning(self) -> Plan | None:
        """Return the plan of the choice, which has ended, or None. Set the phase to MEASURING.

        Then the caller calls `settle` or `begin_trial`, except while programs are recompiled.
        """
        assert self.phase is Phase.PLANNING and self.choice is not None
        choice, self.choice = self.choice, None
        self.phase, self.steps = Phase.MEASURING, []
        return choice.finish()

    def cancel_planning(self) -> None:
        """End the choice of a plan, if one is being made, and measure again."""
        if self.choice is not None:
            choice, self.choice = self.choice, None
            self.phase, self.steps = Phase.MEASURING, []
            choice.cancel()

    def begin_trial(self, plan: Plan) -> None:
        """Enter the phase TRIAL with this plan."""
        self.phase, self.plan, self.steps = Phase.TRIAL, plan, []

    def end_trial(self) -> Plan:
        """Return the plan of the trial, and set the phase to MEASURING.

        If the trial succeeded, the caller then calls `settle`.
        """
        assert self.phase is Phase.TRIAL and self.plan is not None
        plan, self.plan = self.plan, None
        self.phase, self.steps, self.was_tried = Phase.MEASURING, [], True
        return plan

    def settle(self) -> None:
        """Enter the phase PLANNED, in which no step is measured.

        If a trial is running, end it. This course gets no other trial.
        """
        self.was_tried = self.was_tried or self.phase is Phase.TRIAL
        self.phase, self.steps, self.plan = Phase.PLANNED, [], None

    def measure_again(self, final: bool = False) -> None:
        """Discard the measured steps, and measure again. If `final`, the next plan is used without a
        trial.
        """
        self.phase, self.steps, self.plan = Phase.MEASURING, [], None
        self.was_tried = self.was_tried or final
