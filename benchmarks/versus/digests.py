"""Benchmark of digests: the same training within the same budget, with and without digests of the bytes read
from the drive.

    python benchmarks/versus/digests.py [llama-7m ...] [--part 0.4] [--pairs 9] [--threads 2] [-o FILE]

The steps of the two trainings alternate. Each training runs in its own process and makes its own plan.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from race.asked import add_part, command_line
from race.pairs import Trainee, equal_losses, middle, plain_peak, race
from race.result import Table, write

GOAL = 1.03
NAMES = ("llama-7m", "llama-32m")


def main() -> int:
    parser = command_line(__doc__, "digests", NAMES)
    add_part(parser)
    args = parser.parse_args()
    table = Table(model=11, without=8, **{"with": 8}, ratio=6, spread=6, equal=5, verdict=17)
    rows: list[dict[str, Any]] = []
    for name in args.subjects:
        rows.append(one_row(name, args))
        row = rows[-1]
        equal = "yes" if row["equal"] else "NO"
        table.row(name, row["without_s"], row["with_s"], row["ratio"], row["spread"], equal, row["verdict"])
        write(args.output, "digests", pairs=args.pairs, threads=args.threads, rows=rows)
    return 0 if all(row["equal"] and row["verdict"] != "missed" for row in rows) else 1


def one_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    memory = int(plain_peak(name, args.threads) * args.part)
    request = {"subject": name, "threads": args.threads, "way": "teraio", "memory": memory}
    with Trainee(request) as ours, Trainee({**request, "options": {"checksum": "off"}}) as without:
        ours.settle()
        without.settle()
        found = race(ours, without, args.pairs)
        equal = equal_losses(ours, without)
    return {
        "subject": name,
        "memory": memory,
        **found.figures("without", "with"),
        "read_bytes": int(middle(found.ours, "read_bytes")),
        "written_bytes": int(middle(found.ours, "written_bytes")),
        "equal": equal,
        "verdict": found.verdict(GOAL),
    }


if __name__ == "__main__":
    sys.exit(main())
