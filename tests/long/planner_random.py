"""A test of the default planner's promises on hundreds of random or misleading steps.

    python tests/long/planner_random.py [--count 300] [--from 0] [--seconds 2] [--jitter-runs 5] [--json FILE]

For each step, the planner must return a plan that plan_check accepts and for which two simulators predict the
same time. If the planner refuses the step, the relaxation of the problem must not fit the budget either.

Two limits apply to a planned step. It may not be shorter than the bound, and it may not be longer than the
step under a published system's plan. If the durations of kernels and transfers vary by 10 or 20 %, no byte
may exceed the budget. The script prints figures in the form that run.py reads, and exits with 1 if a figure
misses its target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from random_cases import cases
from random_verdict import SHARES, Verdict, judge
from says import at_most, exactly

TARGETS = {0.1: 3.0, 0.2: 7.0}  # relative jitter of durations -> largest mean slowdown of a step, in per cent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--seconds", type=float, default=2.0, help="time limit of each plan")
    parser.add_argument("--jitter-runs", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found: list[Verdict] = []
    for case in islice(cases(count(args.first)), args.count):
        found.append(judge(case, args.seconds, args.jitter_runs))
        for wrong in found[-1].wrong:
            print(f"{case.name}: {wrong}", flush=True)
        if len(found) % 25 == 0:
            print(f"... {len(found)}", file=sys.stderr, flush=True)
            if args.json:
                save(args.json, found)
    if args.json:
        save(args.json, found)
    return figures(found)


def save(path: Path, found: list[Verdict]) -> None:
    rows = [asdict(verdict) for verdict in found]
    for row in rows:
        row["jitter"] = {f"{share:.0%}{' by step' * by}": each for (share, by), each in row["jitter"].items()}
    text = {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "rows": rows}
    path.write_text(json.dumps(text, indent=1) + "\n")


def figures(found: list[Verdict]) -> int:
    """Print a line per figure. Return 1 if a figure misses its target."""
    planned = [verdict for verdict in found if not verdict.refused]
    wrong = sum(bool(verdict.wrong) for verdict in found)
    gaps = [verdict.step_ns / max(verdict.bound_ns, 1) - 1 for verdict in planned]
    beside = [verdict.slower for verdict in planned if verdict.slower is not None]
    fluid = sum(verdict.fluid for verdict in found)
    refused = f"{len(found) - len(planned)} proven to have no plan, of these {fluid} with room for a fluid"
    print(f"{len(planned)} planned, {refused}; {len(beside)} beside a published plan")
    print(f"gap: median {100 * median(gaps):.2f} %, worst {100 * max(gaps):.1f} %")
    good = exactly("planner-random-steps-with-a-broken-promise", wrong)
    for share in SHARES:
        for by_step in (False, True):
            costs = [100 * verdict.jitter[share, by_step] for verdict in planned if verdict.jitter]
            name = f"planner-random-jitter-{share:.0%}{'-by-step' * by_step}-costs-percent"
            good &= at_most(name, mean(costs), TARGETS[share])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
