"""Figures of a plan: step time, lower bound of the step time, bytes of each lane, life of the drives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, moved_bytes_by_kind
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline
from teraio.units import fmt_bytes, fmt_count, fmt_ns

DAY_NS = 86_400 * 10**9
# Consumer drives are rated for writes of 600 times their size (1200 TB for 2 TB). Data center drives are
# rated for 1800 times their size (one full write per day for five years). Without --endurance the figures
# assume 600 times.
ENDURANCE_WRITES = 600


# The steps for which the bound holds, by the placement of updates.
UPDATES = {
    "step": "",
    "late": " with late updates",
    "auto": " with any late updates",
    "backward": " with updates at any place",
}


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """The figures of one plan.

    `ssd_life_days` is 0 if the plan writes nothing, or if the machine has no drive of known size.
    """

    step_ns: int
    compute_ns: int
    bound_ns: int
    peak_bytes: int
    memory_bytes: int
    plan_ns: int
    planner: str
    ssd_write_bytes: int
    ssd_read_bytes: int
    ssd_write_bytes_per_day: int
    ssd_endurance_bytes: int
    ssd_life_days: int
    moves: int
    feasible: bool = True
    again: int = 0  # number of recomputed tensors
    again_ns: int = 0  # the part of `compute_ns` that is spent on recomputing tensors
    late: int = 0  # number of weights that are updated late
    updates: str = "step"  # where updates were allowed: `step`, `late`, `auto` or `backward`
    backward: int = 0  # number of weights that are updated in the backward

    def as_sentence(self) -> str:
        """Return the figures as a sentence for people.

        A plan without a predicted step time moves tensors only on demand. The sentence then gives no step
        time.
        """
        moves = fmt_count(self.moves, "move")
        changes = UPDATES[self.updates] + " with recompute" * bool(self.again)
        bound = f"the bound {fmt_ns(self.bound_ns)} for this profile{changes}"
        compute = f"compute alone {fmt_ns(self.compute_ns)}{self.describe_recompute()}"
        if not self.step_ns:
            return f"{moves} by {self.planner}: tensors move on demand, no step is predicted; {bound}"
        return (
            f"{moves} by {self.planner} in {fmt_ns(self.plan_ns)}: a step of {fmt_ns(self.step_ns)}"
            f"{self.describe_updates()}, "
            f"{self.step_ns / max(self.bound_ns, 1) - 1:.1%} above {bound} "
            f"({compute}); peak {fmt_bytes(self.peak_bytes)} "
            f"of {fmt_bytes(self.memory_bytes)}; {fmt_bytes(self.ssd_write_bytes)} written to SSD per step"
            f"{self.describe_drive_wear()}"
        )

    def describe_updates(self) -> str:
        """Describe how many weights are updated at other places than the end of the step."""
        found = []
        if self.late:
            found.append(f" with late updates of {fmt_count(self.late, 'weight')}")
        if self.backward:
            found.append(f" with updates of {fmt_count(self.backward, 'weight')} in the backward")
        return " and".join(found)

    def describe_recompute(self) -> str:
        """Describe the compute time that the plan spends on recomputing tensors."""
        if not self.again:
            return ""
        return f", {fmt_ns(self.again_ns)} of it to recompute {fmt_count(self.again, 'tensor')}"

    def describe_drive_wear(self) -> str:
        """Describe the bytes that steps of this plan write to the drives per day, and how long the drives
        last.
        """
        if not self.ssd_write_bytes_per_day:
            return ""
        per_day = f", {self.ssd_write_bytes_per_day / 1e12:.1f} TB per day"
        if not self.ssd_endurance_bytes:
            return per_day
        rated = f"{self.ssd_endurance_bytes / 1e12:,.0f} TB they are rated for"
        return f"{per_day}: {self.format_drive_life()} until the drives have written the {rated}"

    def format_drive_life(self) -> str:
        """Format how long the drives last if such steps run all day."""
        if not self.ssd_write_bytes_per_day or not self.ssd_endurance_bytes:
            return "-"
        if self.ssd_life_days >= 2:
            return fmt_days(self.ssd_life_days)
        hours = 24 * self.ssd_endurance_bytes // self.ssd_write_bytes_per_day
        return fmt_count(hours, "hour") if hours else "under an hour"


def figures_of_plan(
    plan: Plan,
    profile: Profile,
    machine: Machine,
    plan_ns: int,
    endurance_bytes: int,
    updates: str = "step",
) -> PlanFigures:
    """Return the figures of a plan. If `endurance_bytes` is 0, assume that the drives are rated for writes of
    ENDURANCE_WRITES times their size.
    """
    again, late, backward = len(plan.recompute), len(plan.late), len(plan.backward)
    first_ns = profile.compute_ns
    plan, profile = apply_plan_changes(plan, profile)
    write = sum(moved_bytes_by_kind(plan, profile, "ssd", evict=True).values())
    step = plan.predicted.step_ns
    per_day = write * DAY_NS // step if step else 0
    rated = sum(tier.rated_bytes for tier in machine.tiers if tier.name.startswith("ssd"))
    endurance = endurance_bytes or ENDURANCE_WRITES * rated
    return PlanFigures(
        step,
        profile.compute_ns,
        plan.predicted.bound_ns,
        plan.predicted.peak_bytes,
        plan.budget_bytes,
        plan_ns,
        plan.planner,
        write,
        sum(moved_bytes_by_kind(plan, profile, "ssd", evict=False).values()),
        per_day,
        endurance,
        endurance // per_day if per_day else 0,
        len(plan.moves),
        again=again,
        again_ns=profile.compute_ns - first_ns,
        late=late,
        updates=updates,
        backward=backward,
    )


def time_and_bytes_by_lane(line: Timeline) -> Iterator[tuple[str, int, int]]:
    """Yield (lane, total ns of its transfers, total bytes of its transfers) for each lane. A lane is one
    direction of one link, such as `evict:ssd`.
    """
    for track in sorted({span.track for span in line.spans} - {"compute"}):
        spans = [span for span in line.spans if span.track == track]
        yield track, sum(s.end_ns - s.start_ns for s in spans), sum(s.bytes for s in spans)


def fmt_days(days: int) -> str:
    return f"{days / 365:.1f} years" if days >= 730 else fmt_count(days, "day")
