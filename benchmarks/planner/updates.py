"""Benchmark of the predicted gain of late updates: steps of Llama-3.1-8B and 70B on four machines.

    python benchmarks/planner/updates.py [--updates step late auto] [--rows 0 1 2 3 4 5] [-o FILE]

The default planner plans each row once with updates at the end of the step, once with all updates late, and
once with `auto`. A plan of 8B takes at most 15 s, a plan of 70B at most 45 s. More ways are `backward`, and
`step+recompute`, `auto+recompute` and `backward+recompute`, which may recompute tensors. With `--cpu-clock`,
all times of planning are CPU time (cpu_clock.py). With `--times 3`, the time limits are three times as long.

The bound is a step time that no plan with this order of kernels can beat. For `auto` and `backward`, it holds
for any places of updates. The largest ratios are at the end: step by computing alone, and step by bound.

The script skips cases that FILE already contains, so a stopped run can continue.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import cpu_clock
from kept_rows import KeptRows
from table import written

from teraio.formats.machine import Machine
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile
from teraio.passes.planner import planners

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
CASES = (
    ("llama-3.1-8b-b16-checkpoint", "h100-8ssd-nohost", 24, 15.0),
    ("llama-3.1-8b-b16-checkpoint", "h100-4ssd", 24, 15.0),
    ("llama-3.1-8b-b16-checkpoint", "rtx4090-1ssd", 20, 15.0),
    ("llama-3.1-8b-b4", "h100-4ssd-nohost", 48, 15.0),
    ("llama-3.1-8b-b4", "h100-4ssd-nohost", 24, 15.0),
    ("llama-3.1-70b-b8", "h100-8ssd", 72, 45.0),
)
WAYS = ("step", "late", "auto")
MORE_WAYS = ("backward", "step+recompute", "auto+recompute", "backward+recompute")
KEY = ("profile", "machine", "memory_gib", "updates")


def planned(
    name: str, on: str, gib: int, seconds: float, updates: str, clock: Callable[[], float]
) -> dict[str, Any]:
    profile = Profile.read(PROFILES / f"{name}.profile.json.gz")
    machine = Machine.read(PROFILES / "machines" / f"{on}.machine.json")
    began = clock()
    placement, _, again = updates.partition("+")
    plan = planners.plan(
        profile,
        machine,
        gib * 2**30,
        time_limit_s=seconds,
        updates=placement,
        recompute=bool(again),
    )
    return {
        "step_ms": plan.predicted.step_ns // 10**6,
        "bound_ms": plan.predicted.bound_ns // 10**6,
        "compute_ms": profile.compute_ns // 10**6,
        "late_weights": len(plan.late),
        "backward_weights": len(plan.backward),
        "recomputed_tensors": len(plan.recompute),
        **written(*apply_plan_changes(plan, profile)),
        "limit_s": seconds,
        "planning_s": round(clock() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", nargs="+", choices=WAYS + MORE_WAYS, default=WAYS)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--cpu-clock", action="store_true", help="limit the CPU time of planning")
    parser.add_argument("--times", type=float, default=1.0, help="factor of the time limits")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.cpu_clock:
        cpu_clock.use()
    clock = time.process_time if args.cpu_clock else time.monotonic
    kept = KeptRows(args.output, "planner_updates", KEY)
    for name, on, gib, seconds in (CASES[row] for row in args.rows):
        for updates in args.updates:
            if (case := (name, on, gib, updates)) not in kept.known:
                kept.add(case, planned(name, on, gib, args.times * seconds, updates, clock))
    gaps = [row["step_ms"] / row["bound_ms"] - 1 for row in kept.rows]
    print(f"gap to the bound: median {median(gaps):.1%}, largest {max(gaps):.1%}")
    for row in kept.rows:
        print(*(row[name] for name in KEY), f"{row['step_ms'] / row['compute_ms']:.3f} of computing alone")


if __name__ == "__main__":
    main()
