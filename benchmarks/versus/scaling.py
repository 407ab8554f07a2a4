"""Benchmark of steps and planning when layers and batch grow by factors of 2, 4 and 8.

    python benchmarks/versus/scaling.py [--part 0.5] [--pairs 5] [--threads 1] [--inner eager] [-o FILE]

There is a row per size. Two trainings of this size alternate: with a budget, and plain. A row holds:

ratio             step time with the budget / plain step time
slots/s           slots per second
us/slot           microseconds of the engine's own work per slot, without waits
plan              seconds of planning
other, of plain   memory of the process outside tensors, for teraio and for plain training
held              the growth of (other - of plain) since the first row, as a share of the growth of the bytes
                  in tensors: goal 1 %
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from race.asked import two_or_more
from race.pairs import Trainee, middle, most, race
from race.result import RESULTS, Table, write

GOAL_HELD = 0.01
FIRST = {"layers": 4, "batch": 2, "length": 128, "hidden": 128, "vocabulary": 2048}
TIMES = (2, 4, 8)


def sizes() -> dict[str, dict[str, int]]:
    found = {"first": FIRST}
    for times in TIMES:
        found[f"layers x {times}"] = {**FIRST, "layers": FIRST["layers"] * times}
        found[f"batch x {times}"] = {**FIRST, "batch": FIRST["batch"] * times}
        found[f"both x {times}"] = {**found[f"layers x {times}"], "batch": FIRST["batch"] * times}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--part", type=float, default=0.5, help="teraio's budget, as a share of the plain peak"
    )
    parser.add_argument("--pairs", type=two_or_more, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--inner", default="eager", choices=("eager", "inductor"))
    parser.add_argument("-o", "--output", default=str(RESULTS / "scaling.json"))
    args = parser.parse_args()
    table = Table(
        **{"size": 10, "kernels": 7, "tensors": 7, "plain": 7, "ratio": 6, "slots/s": 8},
        **{"us/slot": 7, "plan": 6, "other": 9, "of plain": 9, "held": 6},
    )
    rows: list[dict[str, Any]] = []
    for name, size in sizes().items():
        rows.append(one_row(name, ",".join(f"{key}={value}" for key, value in size.items()), args))
        row, first = rows[-1], rows[0]
        grown = row["managed_bytes"] - first["managed_bytes"]
        row["held"] = (extra(row) - extra(first)) / grown if grown else 0.0
        table.row(
            *(name, row["kernels"], row["tensors"], row["plain_s"], row["ratio"]),
            *(round(row["slots_per_s"]), row["slot_us"], row["plan_s"]),
            *(f"{row['other_bytes'] / 2**20:.1f}", f"{row['plain_other_bytes'] / 2**20:.1f}", row["held"]),
        )
        write(args.output, "scaling", part=args.part, pairs=args.pairs, inner=args.inner, rows=rows)
    return 0 if all(row["held"] <= GOAL_HELD for row in rows) else 1


def extra(row: dict[str, Any]) -> int:
    return int(row["other_bytes"] - row["plain_other_bytes"])


def one_row(name: str, subject: str, args: argparse.Namespace) -> dict[str, Any]:
    request = {"subject": subject, "threads": args.threads, "options": {"inner": args.inner}}
    with Trainee({**request, "way": "without", "memory": 2**40}) as plain:
        peak = most(plain.settle().rows, "tensors")
        with Trainee({**request, "way": "teraio", "memory": int(peak * args.part)}) as ours:
            found = race(ours.settle(), plain, args.pairs)
            facts = ours.facts()
    waits_ns = middle(found.ours, "stall_ns")
    return {
        "name": name,
        "subject": subject,
        "plain_s": found.middle("theirs"),
        "ours_s": found.middle("ours"),
        "ratio": found.ratio(),
        "kernels": facts["kernels"],
        "tensors": facts["tensors"],
        "managed_bytes": facts["managed_bytes"],
        "slots_per_s": facts["kernels"] / found.middle("ours"),
        "slot_us": max(0.0, facts["in_slots_ns"] - waits_ns) / facts["kernels"] / 1e3,
        "plan_s": facts["plan_s"],
        "other_bytes": int(middle(found.ours, "other")),
        "plain_other_bytes": int(middle(found.theirs, "other")),
    }


if __name__ == "__main__":
    sys.exit(main())
