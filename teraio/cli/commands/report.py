"""`teraio report`: one training step, shown as an HTML page, as text or as a trace."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from teraio import options
from teraio.errors import OptionError
from teraio.formats import shipped_files
from teraio.formats.files import write_bytes
from teraio.formats.plan import Plan
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile
from teraio.formats.timeline import Timeline
from teraio.report import chrome_trace, content, html_page, terminal_text
from teraio.terminal import terminal_of
from teraio.units import fmt_bytes

from .explain import answer_what_if, what_if_rows
from .plan_request import (
    MACHINE,
    PROFILE,
    add_what_if_argument,
    read_checked_plan,
    read_or_synthesize_profile,
)

DESCRIPTION = """\
Shows a measured or a predicted step: memory over time by kind under the budget, the work of compute and of
every lane, and each wait with its cause. The page is one file that needs no network. It answers where a
tensor is, when and why.

Only the timeline is required. --profile adds the uses of tensors, and --plan adds the bound. --predicted adds
a comparison with another timeline. --profile, --plan and --machine together predict that timeline, and add
changes that would make the step faster."""

EPILOG = """\
Without -o, --trace or --json the report is printed, as with --text.

examples:
  teraio report run.timeline.json
  teraio report run.timeline.json --profile run.profile.json -o report.html
  teraio report run.timeline.json --profile run.profile.json --plan run.plan.json \\
      --machine here.machine.json --what-if bound -o report.html
  teraio report run.timeline.json --trace run.trace.json    # open it at ui.perfetto.dev

exit codes: 0 done, 1 the plan is not for this profile and machine, 2 bad input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "timeline_file", metavar="TIMELINE", help="a file that options={'timeline': ...} writes"
    )
    parser.add_argument("--profile", dest="profile_file", metavar="FILE", help=PROFILE)
    parser.add_argument("--plan", dest="plan_file", metavar="FILE", help="the plan that the step followed")
    parser.add_argument("--machine", metavar="FILE", help=MACHINE)
    parser.add_argument("--predicted", metavar="FILE", help="a timeline to compare with")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the page to this file")
    parser.add_argument("--text", action="store_true", help="print the report")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="waits to print (8)")
    add_what_if_argument(parser)
    options.add_flags(parser, ["plan_time"])
    parser.add_argument("--json", action="store_true", help="print figures and tables as one JSON object")


def main(args: argparse.Namespace) -> int:
    sources, profile = _read_sources(args)
    report = content.assemble_content(sources, _what_if_table(args, sources, profile))
    if args.output:
        page = html_page.report_as_html(report)
        write_bytes(args.output, page.encode())
    if args.trace:
        write_bytes(args.trace, chrome_trace.timeline_as_trace(sources.line).encode())
    if args.json:
        print(json.dumps(_report_as_dict(report)))
    elif args.text or not (args.output or args.trace):
        print(terminal_text.report_as_text(report, max(args.top, 0), terminal_of(sys.stdout)))
    elif args.output:
        print(f"{args.output}: {report.title}, {fmt_bytes(len(page.encode()))}")
    return 0


def _read_sources(args: argparse.Namespace) -> tuple[content.Sources, Profile | None]:
    """Return the sources of the report, and the profile as its file contains it.

    A predicted timeline of a plan that changes the step is shown with the profile of the changed step.
    """
    from teraio.passes.planner.simulate.simulate import simulate

    line = Timeline.read(args.timeline_file)
    machine = shipped_files.read_named_machine(args.machine) if args.machine else None
    profile = read_or_synthesize_profile(args.profile_file, machine) if args.profile_file else None
    predicted = Timeline.read(args.predicted) if args.predicted else None
    plan: Plan | None = None
    shown = profile
    if args.plan_file and profile is not None and machine is not None:
        plan, step = apply_plan_changes(read_checked_plan(args.plan_file, profile, machine), profile)
        if predicted is None and line.kind == "measured":
            predicted = simulate(plan, step, machine)
        shown = step if line.kind == "predicted" else profile
    elif args.plan_file:
        plan = Plan.read(args.plan_file)
    return content.Sources(line, Path(args.timeline_file).name, shown, plan, machine, predicted), profile


def _what_if_table(
    args: argparse.Namespace, sources: content.Sources, profile: Profile | None
) -> content.Table | None:
    from teraio.passes.planner.simulate.simulate import step_ns

    plan, machine = sources.plan, sources.machine
    limit_ns = options.settings_from_flags(args).plan_time
    if plan is None or profile is None or machine is None or args.what_if == "off":
        return None
    if not plan.budget_bytes:
        raise OptionError(f"{args.plan_file} has no budget_bytes. Make a new plan with `teraio plan`")
    made = Plan.read(args.plan_file)
    answers = answer_what_if("teraio report", made, profile, machine, args.what_if, limit_ns)
    head, *rows = what_if_rows(answers, step_ns(*apply_plan_changes(made, profile), machine))
    caption = "Predictions for the same step, planned again: on this machine, and with one change"
    return content.Table(caption, tuple(head), tuple(rows))


def _report_as_dict(report: content.Content) -> dict[str, object]:
    tables = {
        name: {"head": table.head, "rows": table.rows}
        for name in ("memory", "lanes", "slices", "waits", "compared", "drifts", "what_if")
        if (table := getattr(report, name)) is not None
    }
    return {
        "title": report.title,
        "sentences": report.sentences,
        "causes": report.causes,
        "facts": [asdict(fact) for fact in report.facts],
        "numbers": content.figures_of_timeline(report.sources.line),
        "tables": tables,
    }
