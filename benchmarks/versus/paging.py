"""A race of teraio against the paging of the operating system.

    python benchmarks/versus/paging.py [llama-32m ...] [--part 0.4] [--pairs 9] [--swap-gib 16] [--folder DIR]
                                [-o FILE]

Plain training runs in a control group that has as little memory as teraio's process, and pages to a swap file
on the same disk. The script needs root, because it makes control groups and a swap file, and removes them.
The limit is the peak of teraio's whole process in a planned step. Each of the two trainings runs in its own
control group with this limit. The system thus enforces the limit for both in the same way. teraio's group
gets the limit only after teraio has planned.

Goal: a step of teraio takes at most a third of the time of a paging step. The system may kill the plain
training although the swap file has room. This happens if the system writes pages more slowly than the
training allocates them. The script counts and repeats such runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from control_group import group
from race.asked import add_part, command_line
from race.pairs import Died, Trainee, equal_losses, most, plain_peak, race
from race.result import Table, bars, write

from teraio.units import fmt_bytes

NAMES = ("llama-7m", "llama-32m", "resnet-50")
GOAL = 1 / 3
SPARE_BYTES = 16 * 2**20  # added to the limit, for page tables and pages of files
TRIES = 5


def main() -> int:
    parser = command_line(__doc__, "paging", NAMES)
    add_part(parser)
    parser.add_argument("--swap-gib", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path.home(), help="folder of the swap file")
    args = parser.parse_args()
    if os.geteuid():
        print("not run: control groups and the swap file need root", file=sys.stderr)
        return 2
    table = Table(model=11, limit=10, budget=10, paging=8, ours=7, ratio=6, spread=6, equal=5, verdict=17)
    rows: list[dict[str, Any]] = []
    with paging_room(args.folder / "teraio-benchmark.swap", args.swap_gib * 2**30):
        for name in args.subjects:
            rows.append(one_row(name, args))
            row = rows[-1]
            if "ratio" not in row:
                print(row["error"], file=sys.stderr)
                continue
            table.row(
                *(name, fmt_bytes(row["limit_bytes"]), fmt_bytes(row["memory"]), row["paging_s"]),
                *(
                    row["ours_s"],
                    row["ratio"],
                    row["spread"],
                    "yes" if row["equal"] else "NO",
                    row["verdict"],
                ),
            )
            write(args.output, "paging", part=args.part, pairs=args.pairs, threads=args.threads, rows=rows)
    shown = [
        (f"{who}, {row['subject']}", row[key], f"{row[key]:.2f} s")
        for row in rows
        if "ratio" in row
        for who, key in (("teraio", "ours_s"), ("paging", "paging_s"))
    ]
    if shown:
        bars(args.output.removesuffix(".json") + ".svg", "A step in the same memory", shown)
    return 0 if all(row["verdict"] not in ("missed", "failed") for row in rows) else 1


def one_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    plainly = {"subject": name, "way": "plain", "threads": args.threads}
    peak = plain_peak(name, args.threads)
    memory = int(peak * args.part)
    row: dict[str, Any] = {"subject": name, "memory": memory, "plain_peak_bytes": peak}
    with ExitStack() as stack:
        try:
            groups = [stack.enter_context(group(f"teraio-benchmark-{number}")) for number in range(2)]
            request = {**plainly, "way": "teraio", "memory": memory}
            ours = stack.enter_context(Trainee(request, groups[0].first)).settle()
            row["limit_bytes"] = most(ours.rows[-2:], "resident") + SPARE_BYTES
            for each in groups:
                each.limit(row["limit_bytes"])
        except Died as error:
            return row | {"verdict": "failed", "error": str(error)}
        for row["killed"] in range(TRIES):
            try:
                theirs = stack.enter_context(Trainee(plainly, groups[1].first)).settle()
                found = race(ours, theirs, args.pairs)
                break
            except Died as error:
                if ours.process.poll() is not None or row["killed"] == TRIES - 1:
                    return row | {"verdict": "failed", "error": str(error)}
                print(f"{name}: the system killed the plain training; trying again", file=sys.stderr)
    row |= found.figures("paging") | {"equal": equal_losses(ours, theirs)}
    row["verdict"] = found.verdict(GOAL)
    # All ratios reach the goal, although paging times vary.
    if found.ratio() <= GOAL and max(found.ratios()) <= GOAL:
        row["verdict"] = "met"
    return row


@contextmanager
def paging_room(path: Path, size: int) -> Iterator[None]:
    path.unlink(missing_ok=True)
    subprocess.run(["fallocate", "-l", str(size), str(path)], check=True)
    try:
        path.chmod(0o600)
        subprocess.run(["mkswap", str(path)], check=True, capture_output=True)
        subprocess.run(["swapon", str(path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["swapoff", str(path)], check=True)
    finally:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
