"""`teraio plan`: makes a plan from a profile for any machine, or compares all planners."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace

from teraio import options
from teraio.errors import OptionError, PlanError, TeraioError
from teraio.formats.plan import Plan
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.updates import PLACEMENTS
from teraio.progress import show_stage
from teraio.text_table import table_for_stdout
from teraio.units import fmt_bytes, fmt_ns, parse_bytes

from .plan_figures import UPDATES, PlanFigures, figures_of_plan
from .plan_request import PROFILE, PlanRequest, request_from_arguments
from .plan_request import add_arguments as add_common

DESCRIPTION = """\
Makes a plan: which tensors are evicted from device memory, when and to which tier, and when they are fetched.
Independent code checks the plan, and a simulation predicts its step. A lower bound shows how far that step is
from the best possible one for this profile and machine: for its order of kernels, kernel times and links."""

EPILOG = """\
--planner all runs every planner, prints one line for each and marks the fastest plan. -o writes that plan.

The life of the drives is their rated endurance divided by the bytes that a day of such steps writes.
--endurance is the rating of all drives together (TBW on the data sheet), by default 600 times their size.
With --max-write-per-day planners reduce writes where that helps. If a step would still write too much, it
takes longer.

examples:
  teraio plan run.profile.json --machine h100-4ssd --memory 40GiB -o run.plan.json
  teraio plan run.profile.json --machine h100-4ssd --timeline run.predicted.json
  teraio plan run.profile.json --machine h100-4ssd --memory min --planner all
  teraio plan run.profile.json --machine here.machine.json --endurance 2400TB --json

exit codes: 0 a plan was made, 1 there is no plan (the line ends with a remedy), 2 bad input"""

UPDATES_HELP = (
    "step (default): the optimizer updates weights at the end of the step; late: just before their next use; "
    "auto: late where this is faster; backward: also in the backward, as soon as the gradients are final"
)
PLANNERS = f"the planner: {', '.join(options.PLANNERS)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("profile_file", metavar="PROFILE", help=PROFILE)
    add_common(parser, "memory", "plan_time", "keep", "recompute", "max_write_per_day")
    parser.add_argument("--planner", default=None, metavar="X", help=f"{PLANNERS}, or all of them: all")
    parser.add_argument("--updates", choices=PLACEMENTS, default="step", help=UPDATES_HELP)
    parser.add_argument("--endurance", default="", metavar="X", help="bytes the drives are rated for: 2400TB")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan to this file")
    parser.add_argument("--timeline", metavar="FILE", help="write its predicted timeline to this file")


def main(args: argparse.Namespace) -> int:
    all_planners = args.planner == "all"
    args.planner = None if all_planners else args.planner
    endurance, request = parse_endurance_bytes(args), request_from_arguments(args, args.profile_file)
    if all_planners:
        return _compare_planners(args, request, endurance)
    try:
        plan, plan_ns = request.make_plan()
    except PlanError as error:
        if args.json:
            result = {
                "feasible": False,
                "memory_bytes": request.budget_bytes,
                "smallest_bytes": request.floor_bytes,
            }
            print(json.dumps({**result, "planner": request.planner, "why": str(error)}))
        raise
    made = _figures(request, plan, plan_ns, endurance)
    _write_plan_and_timeline(args, plan, request)
    print(json.dumps(asdict(made)) if args.json else made.as_sentence())
    return 0


def parse_endurance_bytes(args: argparse.Namespace) -> int:
    try:
        return parse_bytes(args.endurance) if args.endurance else 0
    except ValueError as error:
        raise OptionError(f"--endurance: {error}") from None


def _compare_planners(args: argparse.Namespace, request: PlanRequest, endurance: int) -> int:
    """Run every planner, print their results side by side, and write the fastest plan.

    Return the exit code.
    """
    from teraio.passes.planner.planners import PLANNERS

    distinct = {make: name for name, make in PLANNERS.items()}  # the last name of each planner
    plans: dict[str, Plan] = {}
    rows: dict[str, PlanFigures] = {}
    refused: dict[str, str] = {}
    with show_stage("teraio plan"):
        for number, name in enumerate(distinct.values(), 1):
            try:
                with show_stage(f"planner {number} of {len(distinct)}"):
                    plan, plan_ns = replace(request, planner=name).make_plan()
            except TeraioError as error:
                refused[name] = str(error)
                continue
            plans[name] = plan
            rows[name] = figures_of_plan(
                plan, request.profile, request.machine, plan_ns, endurance, request.updates
            )
    # The bound of one planner is a lower bound of the step time for all plans, also for plans of other
    # planners. The largest bound is therefore valid for all plans, too, and it is the tightest bound.
    bound_ns = max((made.bound_ns for made in rows.values()), default=0)
    rows = {name: replace(made, bound_ns=bound_ns) for name, made in rows.items()}
    predicted = [name for name, made in rows.items() if made.step_ns]
    best = min(predicted, key=lambda name: (rows[name].step_ns, rows[name].ssd_write_bytes), default="")
    if args.json:
        result = [asdict(made) for made in rows.values()]
        print(json.dumps({"best": best, "bound_ns": bound_ns, "planners": result, "refused": refused}))
    else:
        print(_planners_table(request, rows, refused, best))
    if not best:
        return 1
    _write_plan_and_timeline(args, plans[best], request)
    return 0


def _figures(request: PlanRequest, plan: Plan, plan_ns: int, endurance: int) -> PlanFigures:
    return figures_of_plan(plan, request.profile, request.machine, plan_ns, endurance, request.updates)


def _write_plan_and_timeline(args: argparse.Namespace, plan: Plan, request: PlanRequest) -> None:
    from teraio.passes.planner.simulate.simulate import simulate

    if args.output:
        plan.write(args.output)
    if args.timeline:
        step = apply_plan_changes(plan, request.profile)
        simulate(*step, request.machine).write(args.timeline)


def _planners_table(
    request: PlanRequest, rows: dict[str, PlanFigures], refused: dict[str, str], best: str
) -> str:
    head = ("planner", "step", "above bound", "peak", "SSD writes", "SSD reads", "drives last", "planning")
    lines: list[tuple[str, ...]] = [head]
    for name, made in sorted(rows.items(), key=lambda row: (row[1].step_ns or 2**62, row[0])):
        if not made.step_ns:
            lines.append((f"  {name}", "on demand", *["-"] * 5, fmt_ns(made.plan_ns)))
            continue
        lines.append(
            (
                f"{'*' if name == best else ' '} {name}",
                fmt_ns(made.step_ns),
                f"{made.step_ns / max(made.bound_ns, 1) - 1:.1%}",
                fmt_bytes(made.peak_bytes),
                fmt_bytes(made.ssd_write_bytes),
                fmt_bytes(made.ssd_read_bytes),
                made.format_drive_life(),
                fmt_ns(made.plan_ns),
            )
        )
    compute_ns = request.profile.compute_ns
    bound_ns = max((made.bound_ns for made in rows.values()), default=0)
    steps = f"this profile{UPDATES[request.updates]}"
    title = (
        f"{request.profile.name} on {request.machine.name} within {fmt_bytes(request.budget_bytes)}: "
        f"compute alone {fmt_ns(compute_ns)}, no plan for {steps} takes less than {fmt_ns(bound_ns)}"
    )
    no_plan = [f"    {name}: no plan: {why}" for name, why in sorted(refused.items())]
    return "\n".join([title, table_for_stdout(lines), *no_plan])
