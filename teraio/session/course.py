"""The course of one step: from its first measurement to a plan, and back.

    MEASURING    the engine measures steps; they move tensors on demand, or follow a plan that drifted
        |  a plan of an earlier run is found, or the planner makes one
        v
    TRIAL        steps follow the plan; the second step is compared with the plan's prediction
        |  the second step takes as long as predicted       if it does not: MEASURING again
        v
    PLANNED      steps follow the plan, or move tensors on demand until the end; no step is measured

If a plan recomputes tensors, Dynamo compiles programs again. The session is RECOMPILING during this time, and
ignores measured steps. The recompiled step has other programs, and a course of its own.

A course belongs to one order of programs. Only the methods of a course change the course.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.schedule import Step

Order = tuple[str, ...]  # identities of a step's programs, in order

TRIAL_STEPS = 2  # the first step does not count, because its tensors start in tiers that no plan chose


class Phase(Enum):
    """The states of a course; RECOMPILING is a state of the whole session."""

    MEASURING = "measuring"
    TRIAL = "trial"
    PLANNED = "planned"
    RECOMPILING = "recompiling"


@dataclass(slots=True)
class Course:
    """One order of programs: its phase, its measured steps, and the plan on trial."""

    order: Order
    phase: Phase = Phase.MEASURING
    steps: list[Step] = field(default_factory=list)  # steps measured since the phase began
    plan: Plan | None = None  # the plan on trial
    was_tried: bool = False  # True: the next plan is final and gets no trial
    source: tuple[Profile, Step] | None = None  # the input of the last plan

    def add_step(self, step: Step) -> int:
        """Add a measured step. Return the number of measured steps."""
        self.steps.append(step)
        return len(self.steps)

    def take_steps(self) -> list[Step]:
        """Return the measured steps, and clear the list."""
        steps, self.steps = self.steps, []
        return steps

    def note_source(self, profile: Profile, step: Step) -> None:
        """Keep the profile and the step from which a plan is made. `set_memory` can then plan again for
        another budget.
        """
        self.source = profile, step

    def begin_trial(self, plan: Plan) -> None:
        """Enter the phase TRIAL with this plan."""
        self.phase, self.plan, self.steps = Phase.TRIAL, plan, []

    def end_trial(self) -> Plan:
        """Return the plan of the trial, and go back to MEASURING.

        A later call of `settle` accepts the plan.
        """
        assert self.phase is Phase.TRIAL and self.plan is not None
        plan, self.plan = self.plan, None
        self.phase, self.steps, self.was_tried = Phase.MEASURING, [], True
        return plan

    def settle(self) -> None:
        """Enter the phase PLANNED: no further step is measured. A trial that still runs counts as the only
        one."""
        self.was_tried = self.was_tried or self.phase is Phase.TRIAL
        self.phase, self.steps, self.plan = Phase.PLANNED, [], None

    def measure_again(self, final: bool = False) -> None:
        """Discard the measured steps and measure again. If `final`, the next plan gets no trial."""
        self.phase, self.steps, self.plan = Phase.MEASURING, [], None
        self.was_tried = self.was_tried or final
