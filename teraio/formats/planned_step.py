"""The step of a plan. In: a plan, the profile of a measured step. Out: the profile that the plan is for.

A plan may change the step. With `late`, updates of weights run in the next forward (late_updates.py). With
`recompute`, kernels run again (recompute.py). The ticks of the plan's moves count the kernels of the changed
step.
"""

from __future__ import annotations

from dataclasses import replace

from teraio.formats.late_updates import profile_with_late_updates
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.recompute import profile_with_recomputation


def apply_plan_changes(plan: Plan, profile: Profile) -> tuple[Plan, Profile]:
    """Return the plan without `late` and `recompute`, and the profile of the changed step.

    The plan's moves belong to the changed step.
    """
    step = profile_with_recomputation(profile_with_late_updates(profile, plan.late), plan.recompute)
    return replace(plan, late=(), recompute=()), step
