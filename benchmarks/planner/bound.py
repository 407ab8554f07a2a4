"""Benchmark of the gap between a plan's step time and its bound, and of the CPU time for plan and bound.

    python benchmarks/planner/bound.py [profile.json ...] [--memory 0.6,0.3] [--rate 20,40] [--plan-time 30]
                                       [--planners greedy,auto] [-o result.json]

The bound is a step time that no plan can beat. The script prints a row per profile, memory and machine.
Memory is a share of the peak of a step in which nothing moves. `--rate` lists machines: each has one slow
tier, with this rate in GB/s in both directions. Without profiles, the script generates decoder-like steps of
8, 16 and 32 blocks. Seconds are CPU seconds: one figure for the bound alone, and one figure for each planner
including the bound. A planner's gap is (its step / the bound) - 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import toys

from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.passes.planner.bound.bound import lower_bound
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import build_problem


def row(
    profile: Profile, machine: Machine, part: float, planners: list[str], limit_s: float
) -> dict[str, Any]:
    """Return the row of one profile on one machine with a share of its memory."""
    problem = build_problem(profile, machine)
    floor, live = int(problem.floor.max()), int(problem.live.max())
    budget = max(floor, int(part * live))
    began = time.process_time()
    lower = lower_bound(problem, machine, budget, time_limit_s=limit_s)
    found: dict[str, Any] = {
        "profile": profile.name,
        "kernels": len(profile.kernels),
        "gaps": len(problem.gaps),
        "memory_bytes": budget,
        "live_bytes": live,
        "machine": machine.name,
        "compute_ns": profile.compute_ns,
        "simple_ns": lower.simple_ns,
        "bound_ns": lower.step_ns,
        "checks": len(lower.checks),
        "bound_s": round(time.process_time() - began, 2),
    }
    for planner in planners:
        began = time.process_time()
        made = plan(profile, machine, budget, planner=planner, time_limit_s=limit_s)
        step, bound = made.predicted.step_ns, max(made.predicted.bound_ns, lower.step_ns)
        found[planner] = {
            "step_ns": step,
            "gap": round(step / bound - 1, 5),
            "seconds": round(time.process_time() - began, 2),
        }
    return found


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("profiles", nargs="*")
    parser.add_argument("--memory", type=numbers, default=[0.6, 0.3])
    parser.add_argument("--rate", type=numbers, default=[20.0, 40.0])
    parser.add_argument("--planners", default="greedy,auto")
    parser.add_argument("--plan-time", type=float, default=30.0)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    profiles = [Profile.read(path) for path in args.profiles]
    rows = []
    for profile in profiles or [toys.llama_like(blocks) for blocks in (8, 16, 32)]:
        for rate in args.rate:
            machine = toys.machine(10**13, 10**14, int(rate * 10**9), 30_000)
            for part in args.memory:
                rows.append(row(profile, machine, part, args.planners.split(","), args.plan_time))
                rows[-1]["rate_bytes_per_s"] = int(rate * 10**9)
                print(json.dumps(rows[-1]), file=sys.stderr)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "plan_time_s": args.plan_time,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
