"""Benchmark of the planner in a process of its own, against the planner in the training process.

    python benchmarks/engine/planning.py [llama-32m ...] [--part 0.4] [--rounds 3] [--threads 2]
                                         [--planner auto] [-o FILE]

The script first measures the peak of plain training. A run trains within a part of this peak, until its steps
follow the plan. In each round, there is a run with planning=process and a run with planning=inline, each in
its own process. There is a row per model and way, with medians over the rounds.

longest      the longest step from the third step on: with `inline`, the step that waits for the planner
measured     the median of the steps before the plan; with `process`, most of them run beside the planner
planned      the median of five steps with the plan
to the plan  seconds from the end of the second step to the first step with the plan, and steps in this time
peak         the largest resident memory of the training process, from the third step on
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versus"))

from race.asked import add_part, command_line
from race.pairs import Trainee, plain_peak
from race.result import Table, write

from teraio.units import fmt_bytes

NAMES = ("llama-7m", "llama-32m")
WAYS = ("process", "inline")
STEPS_MOST = 20_000
PLANNED_STEPS = 5

Figures = dict[str, float]


def main() -> None:
    parser = command_line(__doc__, "planning", NAMES)
    add_part(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--planner", default="auto")
    args = parser.parse_args()
    table = Table(model=11, planning=9, longest=8, measured=8, planned=8, to_plan=8, steps=6, peak=10)
    rows: list[dict[str, Any]] = []
    for name in args.subjects:
        memory = int(args.part * plain_peak(name, args.threads))
        found: dict[str, list[Figures]] = {way: [] for way in WAYS}
        for number in range(args.rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                found[way].append(one_run(name, memory, way, args.threads, args.planner))
        for way in WAYS:
            middle = {key: statistics.median(run[key] for run in found[way]) for key in found[way][0]}
            rows.append({"subject": name, "planning": way, "memory": memory, **middle, "runs": found[way]})
            table.row(
                name,
                way,
                *(middle[key] for key in ("longest_s", "measured_s", "planned_s", "to_plan_s")),
                int(middle["to_plan_steps"]),
                fmt_bytes(int(middle["peak_bytes"])),
            )
        write(args.output, "planning", part=args.part, rounds=args.rounds, planner=args.planner, rows=rows)


def one_run(name: str, memory: int, way: str, threads: int, planner: str) -> Figures:
    """Train until steps follow the plan, and some steps more. Return the figures of the run."""
    request = {
        "subject": name,
        "way": "teraio",
        "memory": memory,
        "threads": threads,
        "options": {"planning": way, "planner": planner},
    }
    with Trainee(request) as run:
        while not (run.rows and run.rows[-1]["settled"]):
            run.steps(1)
            assert len(run.rows) < STEPS_MOST, f"{request}: no plan after {STEPS_MOST} steps"
        before = [row["seconds"] for row in run.rows[2:]]
        planned = [row["seconds"] for row in run.steps(PLANNED_STEPS)]
        return {
            "longest_s": max(before + planned),
            "measured_s": statistics.median(before),
            "planned_s": statistics.median(planned),
            "to_plan_s": sum(before),
            "to_plan_steps": len(before),
            "peak_bytes": max(row["resident"] for row in run.rows[2:]),
        }


if __name__ == "__main__":
    main()
