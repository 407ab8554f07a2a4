"""`teraio cache`: lists and removes the plans that earlier runs saved for later runs."""

from __future__ import annotations

import argparse
import json

from teraio.errors import FileFormatError, OptionError
from teraio.formats import plan_cache
from teraio.formats.plan import Plan
from teraio.units import fmt_bytes, fmt_count, fmt_ns

DESCRIPTION = """\
Each run keeps its plans. A later run of the same step (same kernels, tensors, options and kind of machine)
follows them from its second step on, without measuring or planning. Plans are kept in $TERAIO_CACHE_DIR, or
in `teraio` in the user's cache directory. TERAIO_CACHE_DIR=off turns the cache off."""

EPILOG = """\
examples:
  teraio cache list
  teraio cache clear"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("action", choices=("list", "clear"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    folder = plan_cache.find_cache_folder()
    if folder is None:
        raise OptionError("there is no plan cache: TERAIO_CACHE_DIR is off. Unset it")
    kept = plan_cache.PlanCache(folder)
    found = kept.clear() if args.action == "clear" else kept.entries()
    total = sum(entry.size_bytes for entry in found)
    if args.json:
        paths = [str(entry.path) for entry in found]
        print(json.dumps({"folder": str(folder), "action": args.action, "plans": paths, "bytes": total}))
        return 0
    done = "cleared" if args.action == "clear" else "kept"
    print(f"{folder}: {fmt_count(len(found), 'plan')} {done}, {fmt_bytes(total)}")
    for entry in found if args.action == "list" else ():
        try:
            plan = Plan.read(entry.path)
            about = (
                f"{fmt_bytes(plan.budget_bytes):>10}  {fmt_count(len(plan.moves), 'move'):>12}  "
                f"{fmt_ns(plan.predicted.step_ns):>8} per step  by {plan.planner}"
            )
        except FileFormatError as error:
            about = str(error)
        print(f"  {entry.path.name.removesuffix(plan_cache.SUFFIX)}  {about}")
    return 0
