"""Benchmark of the predicted gain of recomputing activations: Llama-3.1-8B, batch 16, with few drives.

    python benchmarks/planner/recompute.py [--seconds 45] [--cpu] [--rows 0 1 2 3 4] [-o results.json]

The default planner plans each row twice: without recomputation (`off`) and with it (`auto`). The machine is
the shipped machine with four drives and no host tier, scaled to the row's number of drives. With `--cpu` the
time limit is in CPU seconds (cpu_clock.py). The bound is a step time that no plan can beat. `gap_percent` is
the percentage by which the step exceeds the bound. With `auto`, the bound also holds for every choice of
tensors to recompute. Each plan has two byte counts per step: (1) bytes written to SSDs, (2) bytes dropped
because a clean copy exists.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versus"))

import cpu_clock
from race.result import write
from table import written

from teraio.formats.machine import Machine
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile
from teraio.passes.planner import planners

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
CASES = (
    *(("llama-3.1-8b-b16", drives, 80) for drives in (1, 2, 4)),
    *(("llama-3.1-8b-b16", drives, 40) for drives in (2, 4)),
)


def machine_of(drives: int) -> Machine:
    """Return the shipped machine with four drives, with bandwidths scaled to this number of drives."""
    four = Machine.read(PROFILES / "machines" / "h100-4ssd-nohost.machine.json")
    links = tuple(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * drives // 4) for link in four.links
    )
    return replace(four, name=f"h100-{drives}ssd-nohost", links=links)


def planned(profile: Profile, machine: Machine, budget: int, again: bool, seconds: float) -> dict[str, Any]:
    began, began_cpu = time.monotonic(), time.process_time()
    plan = planners.plan(profile, machine, budget, time_limit_s=seconds, recompute=again)
    predicted = plan.predicted
    return {
        "step_ms": predicted.step_ns // 10**6,
        "bound_ms": predicted.bound_ns // 10**6,
        "gap_percent": round(100 * (predicted.step_ns / predicted.bound_ns - 1), 1),
        "made_again": len(plan.recompute),
        "moves": len(plan.moves),
        **written(*apply_plan_changes(plan, profile)),
        "planning_s": round(time.monotonic() - began, 1),
        "planning_cpu_s": round(time.process_time() - began_cpu, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="time limit of each plan")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.cpu:
        cpu_clock.use()
    rows = []
    for name, drives, budget_gb in (CASES[row] for row in args.rows):
        profile, machine = Profile.read(PROFILES / f"{name}.profile.json.gz"), machine_of(drives)
        row: dict[str, Any] = {"profile": name, "drives": drives, "memory_gb": budget_gb}
        for word, again in (("off", False), ("auto", True)):
            row[word] = planned(profile, machine, budget_gb * 10**9, again, args.seconds)
        row["times_as_fast"] = round(row["off"]["step_ms"] / row["auto"]["step_ms"], 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.output:
            write(args.output, "planner_recompute", rows=rows)


if __name__ == "__main__":
    main()
