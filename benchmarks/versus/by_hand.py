"""A race of teraio against hand-written ways to save memory: (1) hooks that write saved activations to files,
(2) activation checkpointing, (3) both.

    python benchmarks/versus/by_hand.py [llama-32m ...] [--pairs 9] [--threads 2] [-o FILE]

Each way first trains alone, to measure its peak. The way then races against teraio twice: with the way's peak
as teraio's budget, and with half of it. The way trains unchanged in both races, because it has no setting for
half of the peak. There is a row per model, way and budget. `saved` is the share of the peak of plain training
that the way saves.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from race.asked import command_line
from race.pairs import Died, Trainee, most, plain_peak, race
from race.result import Table, bars, write

from teraio.units import fmt_bytes

WAYS = ("hooks", "checkpoint", "both")
NAMES = ("llama-7m", "llama-32m", "resnet-50")
GOAL = 1.0  # largest allowed value of (teraio's step time / the way's step time)


def main() -> int:
    parser = command_line(__doc__, "by-hand", NAMES)
    args = parser.parse_args()
    table = Table(
        model=11, way=10, peak=10, saved=5, step=7, budget=10, ours=7, ratio=6, spread=6, verdict=17
    )
    rows: list[dict[str, Any]] = []
    for name in args.subjects:
        peak = plain_peak(name, args.threads)
        for way in WAYS:
            with Trainee({"subject": name, "way": way, "threads": args.threads}) as theirs:
                try:
                    theirs.settle()
                except Died as error:
                    rows.append({"subject": name, "way": way, "verdict": "failed", "error": str(error)})
                    print(error, file=sys.stderr)
                    continue
                for part in (1.0, 0.5):
                    rows.append(one_row(name, theirs, peak, part, args))
                    show(table, rows[-1])
                    write(args.output, "by_hand", pairs=args.pairs, threads=args.threads, rows=rows)
    shown = [
        (
            f"{row['subject']}, teraio in {row['part']:.0%} of the memory of {row['way']}",
            row["ratio"],
            ratio_text(row),
        )
        for row in rows
        if "ratio" in row
    ]
    if shown:
        path = args.output.removesuffix(".json") + ".svg"
        bars(path, "Time of a step, as a multiple of the step made by hand", shown, 1.0)
    return 0 if all(row["verdict"] not in ("missed", "failed") for row in rows) else 1


def one_row(name: str, theirs: Trainee, peak: int, part: float, args: argparse.Namespace) -> dict[str, Any]:
    way, way_peak = theirs.asked["way"], most(theirs.rows[1:], "tensors")
    memory = int(way_peak * part)
    row: dict[str, Any] = {"subject": name, "way": way, "part": part, "memory": memory}
    row |= {"way_peak_bytes": way_peak, "plain_peak_bytes": peak}
    try:
        with Trainee({"subject": name, "way": "teraio", "memory": memory, "threads": args.threads}) as ours:
            found = race(ours.settle(), theirs, args.pairs)
    except Died as error:
        return row | {"verdict": "failed", "error": str(error)}
    row |= found.figures("way") | {"peak_bytes": most(found.ours, "tensors")}
    return row | {"verdict": found.verdict(GOAL) if part == 1 else "-"}


def ratio_text(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['ours_s']:.2f} s, {row['way_s']:.2f} s)"


def show(table: Table, row: dict[str, Any]) -> None:
    if "ratio" not in row:
        print(row["error"], file=sys.stderr)
        return
    table.row(
        *(row["subject"], row["way"], fmt_bytes(row["way_peak_bytes"])),
        *(
            f"{1 - row['way_peak_bytes'] / row['plain_peak_bytes']:.0%}",
            row["way_s"],
            fmt_bytes(row["memory"]),
        ),
        *(row["ours_s"], row["ratio"], row["spread"], row["verdict"]),
    )


if __name__ == "__main__":
    sys.exit(main())
