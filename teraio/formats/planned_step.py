"""The step of a plan. In: a plan, the profile of a measured step. Out: the profile that the plan is for.

A plan may change the step. With `recompute`, kernels run again (recompute.py). With `late` and `backward`,
updates of weights run in the next forward or in the backward (updates.py). The ticks of the plan's moves
count the kernels of the changed step.

Recomputation comes first. A kernel that runs again may read a weight, so the update of this weight runs in
the backward only after this kernel.
"""

from __future__ import annotations

from dataclasses import replace

from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.formats.recompute import profile_with_recomputation
from teraio.formats.updates import profile_with_updates


def apply_plan_changes(plan: Plan, profile: Profile) -> tuple[Plan, Profile]:
    """Return the plan without `late`, `backward` and `recompute`, and the profile of the changed step.

    The plan's moves belong to the changed step.
    """
    step = profile_with_recomputation(profile, plan.recompute)
    step = profile_with_updates(step, plan.late, plan.backward)
    return replace(plan, late=(), backward=(), recompute=()), step
