"""The bound, every plan, and the exact planner on hundreds of small random steps: bound <= best = exact.

    python tests/long/planner_exact.py [--seeds 5000] [--from 0]

Ends with 1 if the bound is above the best plan, or if the planner finds a worse one. 2,500 seeds are 600
steps and take a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import brute
import exact_cases

from teraio.passes.planner import plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5_000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    args = parser.parse_args()
    tried = met = beaten = wrong = 0
    for seed, problem, machine, budget in exact_cases.cases(
        range(args.first, args.first + args.seeds), 3_000
    ):
        best = brute.best(problem, machine, budget)
        assert best is not None
        made = plan(problem.profile, machine, budget, planner="ilp")
        simple = plan(problem.profile, machine, budget, planner="greedy").predicted.step_ns
        tried += 1
        met += made.predicted.bound_ns == best[0]
        beaten += best[0] < simple
        if not made.predicted.bound_ns <= best[0] == made.predicted.step_ns:
            wrong += 1
            print(f"seed {seed}, budget {budget}: best {best[0]} ns, {made.predicted}")
    print(f"{tried} steps: {wrong} wrong, bound met on {met}, greedy beaten on {beaten}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
