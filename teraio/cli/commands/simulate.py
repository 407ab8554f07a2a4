"""`teraio simulate`: the predicted duration of a step that follows a plan, and the timeline of this step."""

from __future__ import annotations

import argparse
import json

from teraio.formats.planned_step import apply_plan_changes
from teraio.units import fmt_bytes, fmt_ns

from .plan_figures import time_and_bytes_by_lane
from .plan_request import add_plan_arguments, read_checked_plan, read_profile_and_machine

DESCRIPTION = """\
Simulates the step of a plan on a machine, event by event: the transfers of every link, and the waits of
compute. The plan may be made for another machine with the same tiers. A plan that fails the check is refused.
`teraio explain` lists the causes of the waits."""

EPILOG = """\
example:
  teraio simulate run.plan.json run.profile.json --machine h100-8ssd --timeline 8ssd.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_plan_arguments(parser)
    parser.add_argument(
        *("-o", "--output", "--timeline"), metavar="FILE", help="write the predicted timeline to this file"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def main(args: argparse.Namespace) -> int:
    from teraio.formats.plan_check import check_plan_against_profile
    from teraio.passes.planner.simulate.simulate import simulate, unshared_step_ns

    profile, machine = read_profile_and_machine(args.profile_file, args.machine)
    plan, profile = apply_plan_changes(read_checked_plan(args.plan_file, profile, machine), profile)
    line = simulate(plan, profile, machine)
    if args.output:
        line.write(args.output)
    step, unshared = line.step_ns, unshared_step_ns(plan, profile, machine)
    stalled = sum(stall.ns for stall in line.stalls)
    compute = profile.compute_ns
    peak = check_plan_against_profile(plan, profile, machine).peak_bytes
    if args.json:
        lanes = {track: {"busy_ns": ns, "bytes": size} for track, ns, size in time_and_bytes_by_lane(line)}
        numbers = {"step_ns": step, "compute_ns": compute, "stall_ns": stalled, "peak_bytes": peak}
        numbers["unshared_step_ns"] = unshared
        print(json.dumps({**numbers, "links": lanes}))
        return 0
    lane_texts = [f"{track} {ns / max(step, 1):.0%} busy" for track, ns, _ in time_and_bytes_by_lane(line)]
    print(
        f"a step of {fmt_ns(step)}: {fmt_ns(compute)} of compute, {fmt_ns(stalled)} of waiting; "
        f"peak {fmt_bytes(peak)} of {fmt_bytes(plan.budget_bytes)}; "
        f"{', '.join(lane_texts) or 'nothing moves'}"
    )
    if step != unshared:
        print(f"links share bandwidth; without sharing, a step of {fmt_ns(unshared)}")
    return 0
