"""A test of the bound and of the planners on small random steps. The test finds the best of all possible
plans, and requires bound <= best plan = plan of the exact planner.

    python tests/long/planner_exact.py [--seeds 5000] [--from 0] [--most 1000000] [--json FILE]

The script also compares the default planner's plan with the best plan. 2,500 seeds give 600 steps and take a
minute. The script prints figures in the form that run.py reads, and exits with 1 if a figure misses its
target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import brute
import exact_cases
from says import at_least, exactly

from teraio.passes.planner.planners import plan

CLOSE = 1.02  # largest step time of a close plan, relative to the best plan
SHARE = 95.0  # per cent of steps on which the default plan must be close


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--most", type=int, default=10**6, help="largest number of steps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = dict.fromkeys(("steps", "bound-too-high", "exact-wrong", "close", "met", "greedy-beaten"), 0)
    cases = exact_cases.cases(range(args.first, args.first + args.seeds), 3_000)
    for seed, problem, machine, budget in islice(cases, args.most):
        best = brute.best(problem, machine, budget)
        assert best is not None
        made = plan(problem.profile, machine, budget, planner="ilp").predicted
        usual = plan(problem.profile, machine, budget).predicted
        simple = plan(problem.profile, machine, budget, planner="greedy").predicted.step_ns
        found["steps"] += 1
        found["met"] += made.bound_ns == best[0]
        found["greedy-beaten"] += best[0] < simple
        found["close"] += best[0] <= usual.step_ns <= CLOSE * best[0]
        found["bound-too-high"] += max(made.bound_ns, usual.bound_ns) > best[0]
        found["exact-wrong"] += best[0] != made.step_ns
        if max(made.bound_ns, usual.bound_ns) > best[0] or best[0] != made.step_ns:
            print(f"seed {seed}, budget {budget}: best {best[0]} ns, {made}")
        if found["steps"] % 100 == 0:
            print(f"... {found}", file=sys.stderr, flush=True)
    if args.json:
        text = {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), **found}
        args.json.write_text(json.dumps(text, indent=1) + "\n")
    return figures(found)


def figures(found: dict[str, int]) -> int:
    """Print a line per figure. Return 1 if a figure misses its target."""
    steps = max(found["steps"], 1)
    print(f"{steps} steps: bound met on {found['met']}, greedy beaten on {found['greedy-beaten']}")
    good = exactly("planner-exact-bound-too-high", found["bound-too-high"])
    good &= exactly("planner-exact-exact-wrong", found["exact-wrong"])
    close = 100 * found["close"] / steps
    good &= at_least("planner-exact-default-within-2-percent-of-best", close, SHARE)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
