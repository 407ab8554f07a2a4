"""A race of teraio within a budget against plain training. It also compares teraio with a bound, a step time
that no plan can beat.

    python benchmarks/versus/ideal.py [llama-32m ...] [--parts 1 0.6 0.4 0.25 0] [--pairs 9] [--threads 2]
                               [--keep-freed] [--timelines FOLDER] [-o FILE]

The steps of both trainings alternate, and each training runs in its own process. There is a row per model and
budget.

part      the budget as a share of the plain peak; 0 is the smallest budget of a whole step
          (`memory="min"`)
bound     the largest of three times: compute time, link time, the optimum of the planner's linear program.
          Kernel times are taken while the plan runs
verdict   whether teraio's step took at most the time that this project set as its goal. For 60, 40 and 25 %
          the goal is a multiple of the plain step. If the bound is larger, or the budget is the smallest,
          the goal is a multiple of the bound
drive     the time that the drive needs for the moved bytes, by its measured rates

With `--keep-freed` malloc keeps all freed memory of the plain process, as teraio does. Otherwise plain steps
pay for fresh pages, and large steps free and allocate gigabytes. `--timelines` writes the timeline of one
step per row. `teraio report` then shows the step's waits and drive traffic.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from race.asked import command_line
from race.pairs import Died, Race, Trainee, equal_losses, middle, most, race
from race.result import Table, bars, write

from teraio.units import fmt_bytes

# Budget as a share of the plain peak -> goal as a multiple of the plain step.
GOALS = {0.6: 1.05, 0.4: 1.05, 0.25: 1.15}
GOAL_BOUND = 1.08  # goal as a multiple of the bound, if the bound is above the goal of GOALS
KEEP_FREED = ("env", "MALLOC_MMAP_MAX_=0", f"MALLOC_TRIM_THRESHOLD_={2**40}")
NAMES = ("llama-7m", "llama-32m", "llama-175m", "llama-554m", "resnet-50")


def main() -> int:
    parser = command_line(__doc__, "ideal", NAMES)
    parser.add_argument("--parts", nargs="+", type=float, default=[1, 0.6, 0.4, 0.25, 0])
    parser.add_argument("--keep-freed", action="store_true", help="make the plain process keep freed memory")
    parser.add_argument("--timelines", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    table = Table(
        model=11,
        part=5,
        budget=10,
        peak=10,
        equal=5,
        plain=7,
        ratio=6,
        spread=6,
        bound=6,
        drive=6,
        verdict=17,
    )
    rows: list[dict[str, Any]] = []
    for name in args.subjects:
        request = {"subject": name, "way": "plain", "threads": args.threads}
        with Trainee(request, KEEP_FREED if args.keep_freed else ()) as plain:
            peak = most(plain.settle().rows, "tensors")
            for part in args.parts:
                rows.append(one_row(name, part, peak, plain, args))
                show(table, rows[-1])
                settings = {"pairs": args.pairs, "threads": args.threads, "keep_freed": args.keep_freed}
                write(args.output, "ideal", **settings, rows=rows)
    picture(args.output, rows)
    return 0 if all(row.get("equal") and row["verdict"] != "missed" for row in rows) else 1


def one_row(name: str, part: float, peak: int, plain: Trainee, args: argparse.Namespace) -> dict[str, Any]:
    memory = int(peak * part) if part else "min"
    request: dict[str, Any] = {"subject": name, "way": "teraio", "memory": memory, "threads": args.threads}
    if args.timelines:
        args.timelines.mkdir(parents=True, exist_ok=True)
        request["options"] = {"timeline": str(args.timelines / f"{name}-{part:.2f}.timeline.json")}
    row: dict[str, Any] = {"subject": name, "part": part, "memory": memory, "plain_peak_bytes": peak}
    try:
        with Trainee(request) as ours:
            ours.settle()
            found = race(ours, plain, args.pairs)
            row |= figures(found) | {"equal": equal_losses(ours, plain)}
            row |= limits(found, ours.facts())
    except Died as error:
        return row | {"verdict": "failed", "equal": False, "error": str(error)}
    goal = GOALS.get(part, 1.05)
    if part == 0 or row["bound_s"] > goal * row["plain_s"]:
        row["goal"], row["verdict"] = "bound", found.verdict(GOAL_BOUND * row["bound_s"] / row["plain_s"])
    else:
        row["goal"], row["verdict"] = goal, found.verdict(goal)
    return row


def figures(found: Race) -> dict[str, Any]:
    steady = found.ours
    return {
        **found.figures("plain"),
        "peak_bytes": most(steady, "tensors"),
        "resident_bytes": most(steady, "resident"),
        "plain_resident_bytes": most(found.theirs, "resident"),
        "written_bytes": int(middle(steady, "written_bytes")),
        "read_bytes": int(middle(steady, "read_bytes")),
        "stall_s": middle(steady, "stall_ns") / 1e9,
        "misses": int(middle(steady, "misses")),
    }


def limits(found: Race, facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts that limit the step: two bounds, and the time that the drive needs for the moved bytes."""
    out, back = (facts["rates"][link] for link in ("device ssd", "ssd device"))
    drive_s = max(middle(found.ours, "written_bytes") / out, middle(found.ours, "read_bytes") / back)
    return {
        "drive_s": drive_s,
        "bound_s": facts["bound_loaded_ns"] / 1e9,
        "bound_of_measured_steps_s": facts["bound_ns"] / 1e9,
        "predicted_s": facts["predicted_step_ns"] / 1e9,
        "kernels": facts["kernels"],
        "rates": facts["rates"],
        "torch": facts["torch"],
    }


def show(table: Table, row: dict[str, Any]) -> None:
    if "ratio" not in row:
        table.row(row["subject"], row["part"], *["-"] * 8, row["verdict"])
        print(row["error"], file=sys.stderr)
        return
    budget = fmt_bytes(row["memory"]) if row["memory"] != "min" else "min"
    table.row(
        *(row["subject"], f"{row['part']:.2f}", budget, fmt_bytes(row["peak_bytes"])),
        *("yes" if row["equal"] else "NO", row["plain_s"], row["ratio"], row["spread"]),
        *(row["bound_s"] / row["plain_s"], row["drive_s"] / row["plain_s"], row["verdict"]),
    )


def picture(output: str, rows: list[dict[str, Any]]) -> None:
    shown = [
        (
            f"teraio, {row['subject']}, {row['part']:.0%} of memory"
            if row["part"]
            else f"teraio, {row['subject']}, least",
            row["ratio"],
            f"{row['ratio']:.2f} ({fmt_bytes(row['peak_bytes'])})"
            + (", not settled" if row["verdict"] == "not resolved here" else ""),
        )
        for row in rows
        if "ratio" in row
    ]
    if shown:
        path = output.removesuffix(".json") + ".svg"
        bars(path, "Time of a step within a budget, as a multiple of the step without one", shown, 1.0)


if __name__ == "__main__":
    sys.exit(main())
