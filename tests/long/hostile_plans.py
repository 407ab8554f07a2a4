"""A run of hostile plans on generated models. A hostile plan is a valid file that no planner would make.

Training must give the numbers of plain training and keep to the budget. A hostile plan may only cost time.

    python tests/long/hostile_plans.py [--models 50] [--plans 12] [--first 20000] [--jobs 2]

Six kinds of plans alternate (tests/support/generated_plans.py):

all leave       evicts all tensors together
anything        moves anything at any time, also to missing tiers
too late        fetches tensors late
too early       fetches tensors early
out of order    moves tensors out of order, and twice
all dropped     drops every tensor without writing a copy

Budgets range from the smallest one to all memory, independent of the budget for which the plan was made. The
script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from differential_run import UNSEEN_BYTES, nothing_beside
from differential_sweep import complaints, sweep
from says import at_least, exactly

LEAST = 500  # least number of plans in a whole run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--plans", type=int, default=12, help="per model")
    parser.add_argument("--first", type=int, default=20_000, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.models)
    kinds: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    wrong = over = 0
    for result in sweep(seeds, args.jobs, 10, plans=0, hostile=args.plans):
        for line in complaints(result):
            wrong += 1
            print(line, flush=True)
        for row in hostile_rows(result):
            kinds[row["kind"]] += 1
            moved.update({name: row[name] for name in ("fetches", "evictions", "drops", "skipped")})
            beyond = row["over_bytes"] > UNSEEN_BYTES and nothing_beside(result["what"])
            over += beyond
            if beyond:
                print(f"seed {result['seed']}, plan {row['plan']} ({row['kind']}): {row['over_bytes']} over")
    tried = sum(kinds.values())
    print(f"    {dict(kinds)}; {dict(moved)}")
    least = min(LEAST, args.models * args.plans * 4 // 5)
    good = at_least("hostile-plans-tried", tried, least)
    good &= exactly("hostile-plans-wrong", wrong)
    good &= exactly("hostile-plans-over-the-budget", over)
    good &= at_least("hostile-plans-fetches", moved["fetches"], max(tried, 1))
    return 0 if good else 1


def hostile_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["kind"] not in {"none", "random"}]


if __name__ == "__main__":
    sys.exit(main())
