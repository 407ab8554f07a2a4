"""The request for a plan, built from a command line: profile, machine, budget and planner.

All commands that plan without training use this module.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from teraio import options
from teraio.errors import PlanError
from teraio.formats import shipped_files
from teraio.formats.machine import Machine
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.formats.updates import find_updates, profile_with_updates, weights_of
from teraio.progress import show_stage
from teraio.session.notices import unmatched_keep_lines

PROFILE = (
    "a profile: a file that options={'profile': 'run.profile.json'} or `teraio profile synth` writes, or a "
    "name from `teraio profile list`"
)
MACHINE = "a machine: a file that `teraio doctor -o` writes, or a name from `teraio machine list`"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The input of a planner: profile, machine and budget, with the planner's name and its limits."""

    profile: Profile
    machine: Machine
    budget_bytes: int
    floor_bytes: int
    planner: str
    plan_ns: int  # the planner's time limit
    keep: frozenset[str] = frozenset()
    write_per_day_bytes: int = 0  # 0: no limit
    recompute: bool = False
    updates: str = "step"

    def make_plan(self) -> tuple[Plan, int]:
        """Make a plan. Return the plan, and the time in ns that planning took. Raise PlanError if no plan
        exists.
        """
        from teraio.passes.planner import planners

        began = time.monotonic_ns()
        with show_stage(f"planning by {self.planner}", limit_s=self.plan_ns / 1e9):
            plan = planners.plan(
                self.profile,
                self.machine,
                self.budget_bytes,
                planner=self.planner,
                fingerprint=fingerprint_of_profile(self.profile),
                time_limit_s=self.plan_ns / 1e9,
                keep=self.keep,
                write_per_day_bytes=self.write_per_day_bytes,
                recompute=self.recompute,
                updates=self.updates,
            )
        return plan, time.monotonic_ns() - began


def add_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flag --machine, the flags of the options in `names`, and the flag --json."""
    parser.add_argument("--machine", required=True, metavar="FILE", help=MACHINE)
    options.add_flags(parser, names)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add three arguments: the plan file, its profile and its machine."""
    parser.add_argument("plan_file", metavar="PLAN", help="a plan: `teraio plan -o` writes one")
    parser.add_argument("profile_file", metavar="PROFILE", help=PROFILE)
    parser.add_argument("--machine", required=True, metavar="FILE", help=MACHINE)


def add_what_if_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--what-if",
        choices=("plan", "bound", "off"),
        default="plan",
        help="plan again (default), compute only the bound of such plans, or omit the table",
    )


def request_from_arguments(args: argparse.Namespace, path: str, planner: str = "") -> PlanRequest:
    """Build a plan request from a command line, for the profile at `path`.

    Without --memory, the budget is the capacity of the machine's device memory.
    """
    from teraio.passes.planner.problem.problem import smallest_budget

    # The flag `--updates` of `teraio plan` has other values than the option of a run.
    flags = {name: value for name, value in vars(args).items() if name != "updates"}
    settings = options.settings_from_flags(argparse.Namespace(**flags))
    profile, machine = read_profile_and_machine(path, args.machine)
    for line in unmatched_keep_lines(settings.keep, [tensor.name for tensor in profile.tensors]):
        print(f"teraio: {line}", file=sys.stderr)
    kept = frozenset(t.name for t in profile.tensors if any(fnmatchcase(t.name, g) for g in settings.keep))
    updates = getattr(args, "updates", "step")
    late = weights_of(find_updates(profile)) if updates == "late" else ()
    floor = smallest_budget(profile_with_updates(profile, late), kept)
    device = tier_capacity_bytes(machine)
    budget = settings.memory.resolve(device, floor) if settings.memory else device
    return PlanRequest(
        profile,
        machine,
        budget,
        floor,
        planner or settings.planner,
        settings.plan_time,
        kept,
        write_per_day_bytes=settings.max_write_per_day or 0,
        recompute=settings.recompute == "auto",
        updates=updates,
    )


def read_profile_and_machine(profile: str, machine: str) -> tuple[Profile, Machine]:
    """Read the profile and the machine that a command line names."""
    found = shipped_files.read_named_machine(machine)
    return read_or_synthesize_profile(profile, found), found


def read_or_synthesize_profile(name: str, machine: Machine | None = None) -> Profile:
    """Read a profile, or compute one if `name` is the name of a model.

    A computed profile needs the rates of an accelerator. If the machine's name begins with the name of a
    known accelerator, the profile uses its rates. Otherwise, the profile uses the rates of an H100.
    """
    from teraio.passes.synth import profiles, roofline
    from teraio.passes.synth.models import MODELS

    models = tuple(MODELS)
    if name not in models or shipped_files.names_existing_file(name):
        return Profile.read(shipped_files.find_named_file(name, shipped_files.PROFILES, models))
    known = roofline.accelerator_name_in(machine.name) if machine is not None else ""
    rates = roofline.ACCELERATORS[known or "h100"][0]
    made = profiles.synth(name, profiles.ProfileRequest(rates=rates))
    print(
        f"teraio: {name} is a model: using {made.name}, a step of one sequence with times by the data sheet "
        f"of {known or 'h100'}. `teraio profile synth` makes other steps",
        file=sys.stderr,
    )
    return made


def tier_capacity_bytes(machine: Machine, tier: str = "device") -> int:
    return next((each.capacity_bytes for each in machine.tiers if each.name == tier), 0)


def read_checked_plan(path: str, profile: Profile, machine: Machine) -> Plan:
    """Read a plan. Raise PlanError if the plan is invalid for this profile on this machine.

    If the plan has `recompute`, `late` or `backward`, the caller must pass the result to
    `apply_plan_changes`, which returns the profile of the step that the plan is for.
    """
    plan = Plan.read(path)
    verdict = check_plan_against_profile(plan, profile, machine)
    if not verdict.feasible:
        other = plan.fingerprint and plan.fingerprint != fingerprint_of_profile(profile)
        why = "it was made for another profile; " if other else ""
        raise PlanError(
            f"{path} is no plan for profile {profile.name!r} on machine {machine.name!r}: {why}"
            f"{verdict.problems[0]}. Make one: teraio plan PROFILE --machine MACHINE -o {path}"
        )
    return plan


def request_with_budget(request: PlanRequest, budget_bytes: int) -> PlanRequest:
    return replace(request, budget_bytes=budget_bytes)
