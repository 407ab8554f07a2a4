"""Trainings with `updates="auto"`, one per case. A case dictates how long the steps take.

    update_choice_cases.py '["faster twice", "slower twice", ...]'

The script prints one JSON object per case: whether the numbers equal plain training, the stages of the
choice, and the log lines about it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import late_cases
from late_cases import Training, nothing

import teraio
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.profile import Profile
from teraio.formats.updates import find_updates, profile_with_updates, weights_of
from teraio.passes.planner import planners
from teraio.runtime.engine import engine
from teraio.runtime.step.stats import StepMeter
from teraio.session import late_choice, session

STEPS = 29
MEMORY_BYTES = int(str(late_cases.OPTIONS["memory"]))


class Lines(logging.Handler):
    """The log lines of a training that speak of updates or plan files."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "update" in text or "replaying" in text or "another step" in text:
            self.found.append(text.removeprefix("teraio: "))


def half(profile: Profile, *rest: Any, **more: Any) -> tuple[str, ...]:
    """Return the first half of the weights, in place of the planner's choice."""
    updates = find_updates(profile)
    return weights_of(updates[: len(updates) // 2])


@contextlib.contextmanager
def dictated(before_ns: int, after_ns: int) -> Iterator[None]:
    """Let a step take `after_ns` if updates run late, and else `before_ns`."""

    def step_ns(self: StepMeter) -> int:
        assert engine.ENGINE is not None
        return after_ns if engine.ENGINE.late.weights else before_ns

    with (
        patch.object(planners, "updates_to_run_late", half),
        patch.object(late_choice, "WORTH_PERCENT", -(10**6)),
        patch.object(StepMeter, "step_ns", step_ns),
    ):
        yield


def trained(between: Any = nothing, **options: Any) -> dict[str, Any]:
    """Train, and compare with plain training. Return the stages, the number of late weights at each step, and
    the counts."""
    lines = Lines()
    logging.getLogger("teraio").addHandler(lines)
    logging.getLogger("teraio").setLevel(logging.INFO)
    stages: list[str] = []
    late: list[int] = []
    misses: list[int] = []
    steady: list[bool] = []

    def look(run: Training) -> None:
        between(run)
        if session.SESSION is not None:
            stages.append(session.SESSION.late_choice.stage.value)
            late.append(len(session.SESSION.engine.late.weights or ()))
            misses.append(teraio.stats()["step_misses"])
            steady.append(teraio.stats()["steady"])

    try:
        with patch.object(late_cases, "STEPS", STEPS):
            expected = late_cases.plainly(between)
            _, outcome, counts = late_cases.ours(look, **{"updates": "auto", **options})
    finally:
        logging.getLogger("teraio").removeHandler(lines)
    facts = {name: counts[name] for name in ("owed_updates", "late_updates", "settled_updates", "phase")}
    seen = {"stages": stages, "late": late, "misses": misses, "steady": steady, "lines": lines.found}
    return {"same": outcome == expected, **seen, **facts}


def never_planned() -> dict[str, Any]:
    """Refuse each plan with late updates, as if its predicted step were slower."""
    with dictated(1000, 900), patch.object(late_choice, "WORTH_PERCENT", 100):
        return trained()


def always_settled() -> dict[str, Any]:
    """Read each weight after each step, so that no step with late updates can be timed."""

    def read(run: Training) -> None:
        run.seen.append([p.sum().item() for p in run.model.parameters()])

    with dictated(1000, 900), patch.object(late_choice, "PATIENCE_STEPS", 8):
        return trained(read)


def two_runs(before_ns: int, after_ns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TERAIO_CACHE_DIR=folder):
        with dictated(before_ns, after_ns):
            first = trained()
            teraio.reset()
            return {"first": first, **trained()}


def faster_twice() -> dict[str, Any]:
    return two_runs(1000, 900)


def slower_twice() -> dict[str, Any]:
    return two_runs(1000, 1001)


def another_budget() -> dict[str, Any]:
    """`set_memory` after the choice."""

    def shrink(run: Training) -> None:
        if run.step_number == 18 and session.SESSION is not None:
            teraio.set_memory(MEMORY_BYTES - 20 * 2**10)

    with dictated(1000, 900):
        return trained(shrink)


def planned_offline(folder: str, updates: str) -> tuple[Path, Plan, Profile]:
    """Make a plan from the profile of a run with all updates at `step()`. Return the plan's file, the plan
    and the profile."""
    profile_path, plan_path = Path(folder, "run.profile.json"), Path(folder, "run.plan.json")
    with patch.object(late_cases, "STEPS", 6):
        late_cases.ours(nothing, updates="step", profile=str(profile_path))
    assert session.SESSION is not None
    planning = session.SESSION.planning
    machine, budget_bytes = planning.machine, planning.budget_bytes
    teraio.reset()
    profile = Profile.read(profile_path)
    fingerprint = fingerprint_of_profile(profile)
    plan = planners.plan(
        profile, machine, budget_bytes, planner="greedy", updates=updates, fingerprint=fingerprint
    )
    plan.write(plan_path)
    return plan_path, plan, profile


def refusal(plan_path: Path, updates: str) -> str:
    """Return the error of a run with this plan file and another option `updates`."""
    teraio.reset()
    try:
        late_cases.ours(nothing, updates=updates, plan=str(plan_path))
    except Exception as error:  # noqa: BLE001  torch wraps errors of a backend
        return str(error)
    return ""


def plan_file() -> dict[str, Any]:
    """Follow a plan with half of the updates late."""
    with tempfile.TemporaryDirectory() as folder:
        with patch.object(planners, "find_updates", lambda profile: find_updates(profile)[::2]):
            plan_path, plan, profile = planned_offline(folder, "late")
        derived = fingerprint_of_profile(profile_with_updates(profile, plan.late))
        found = trained(plan=str(plan_path))
        differs, refused = derived != plan.fingerprint, refusal(plan_path, "step")
    return {**found, "of_file": len(plan.late), "differs": differs, "refused": refused}


def plan_file_in_backward() -> dict[str, Any]:
    """Follow a plan with updates in the backward."""
    with tempfile.TemporaryDirectory() as folder:
        plan_path, plan, _ = planned_offline(folder, "backward")
        found = trained(plan=str(plan_path), updates="backward")
        in_backward = teraio.stats()["backward_updates"]
        refused = refusal(plan_path, "auto")
    places = {"of_file": len(plan.backward), "late_of_file": len(plan.late), "backward_updates": in_backward}
    return {**found, **places, "refused": refused}


CASES = {
    "plan file in the backward": plan_file_in_backward,
    "never planned": never_planned,
    "always settled": always_settled,
    "faster twice": faster_twice,
    "slower twice": slower_twice,
    "another budget": another_budget,
    "plan file": plan_file,
}


if __name__ == "__main__":
    late_cases.run_cases(CASES)
