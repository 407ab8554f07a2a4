"""Benchmark of planners: the predicted steps of their plans, compared with each other and with the bound.

    python benchmarks/planner/table.py [--profiles NAME ...] [--gb 80 40] [--ssds 4 8] [--hosts no yes]
                                       [--planners auto g10 ...] [--seconds 10 ...] [--cpu] [-o FILE]

Profiles and machines come from profiles/. A row is one planner on one step with one time limit. `auto` runs
as in a training, and also computes the bound, a step time that no plan can beat. The planners of published
systems have no time limit and compute no bound. Each row holds the predicted step, wall seconds and CPU
seconds. It also holds the bytes written to SSDs, and the bytes dropped without a write. Rows of `auto` also
hold the bound. The native recurrence predicts the step. With `--cpu` time limits are in CPU seconds
(cpu_clock.py), for a machine with other load.

The script skips cases that FILE already contains, so a stopped run can continue. At the end it prints a
table. A row's gap there is the distance to the largest bound among the rows of the same step.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import cpu_clock
from kept_rows import KeptRows

from teraio.errors import PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.passes.planner import planners
from teraio.passes.planner.problem.problem import build_problem
from teraio.passes.planner.simulate.simulate import step_ns

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
PUBLISHED = ("zero-infinity", "g10", "teraio-paper", "10cache")
UNLIMITED_S = 3600.0
CASE = ("profile", "machine", "memory_gb")
KEY = (*CASE, "planner", "limit_s")


def written(plan: Plan, profile: Profile) -> dict[str, int]:
    """Return the bytes written to SSDs in a step, and the bytes dropped because a clean copy exists."""
    sizes = {tensor.name: tensor.size_bytes for tensor in profile.tensors}
    found = {"ssd_written_bytes": 0, "ssd_dropped_bytes": 0}
    for move in plan.moves:
        if isinstance(move, Evict) and move.to.startswith("ssd"):
            found["ssd_dropped_bytes" if move.trigger is None else "ssd_written_bytes"] += sizes[move.tensor]
    return found


def planned(profile: Profile, machine: Machine, budget: int, name: str, limit_s: float) -> dict[str, Any]:
    began, began_cpu = time.monotonic(), time.process_time()
    bound: dict[str, int] = {}
    try:
        if name in PUBLISHED:
            problem = build_problem(profile, machine)
            make = planners.PLANNERS[name]
            plan = make(problem, machine, budget, bound_ns=0, seed=0, time_limit_s=UNLIMITED_S)
        else:
            plan = planners.plan(profile, machine, budget, planner=name, time_limit_s=limit_s)
            bound = {"bound_ns": plan.predicted.bound_ns}
    except PlanError as error:
        return {"refused": str(error)}
    took = {
        "wall_s": round(time.monotonic() - began, 2),
        "cpu_s": round(time.process_time() - began_cpu, 2),
    }
    verdict = check_plan_against_profile(plan, profile, machine)
    assert verdict.feasible, verdict.problems[0]
    step = {"step_ns": step_ns(plan, profile, machine), "moves": len(plan.moves)}
    return {**step, **bound, **written(plan, profile), **took}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    bounds: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in rows:
        case = tuple(row[name] for name in CASE)
        bounds[case] = max(bounds[case], row.get("bound_ns", 0))
    heads = ["step", "machine", "GB", "planner", "limit", "step s", "gap %", "wall s", "CPU s", "written GB"]
    lines = ["| " + " | ".join([*heads, "dropped GB"]) + " |", "|---" * 11 + "|"]
    for row in sorted(rows, key=lambda each: [str(each[name]) for name in KEY]):
        bound = bounds[tuple(row[name] for name in CASE)]
        cells = [str(row[name]) for name in KEY]
        if "refused" in row:
            cells.append("no plan")
        else:
            gap = f"{100 * (row['step_ns'] / bound - 1):.2f}" if bound else ""
            cells += [f"{row['step_ns'] / 1e9:.3f}", gap, str(row["wall_s"]), str(row["cpu_s"])]
            cells += [f"{row[f'ssd_{what}_bytes'] / 1e9:.0f}" for what in ("written", "dropped")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profiles", nargs="+", default=["llama-3.1-8b-b4", "llama-3.1-8b-b16"])
    parser.add_argument("--gb", nargs="+", type=int, default=[80, 40])
    parser.add_argument("--ssds", nargs="+", type=int, choices=(4, 8), default=[4, 8])
    parser.add_argument("--hosts", nargs="+", choices=("no", "yes"), default=["no", "yes"])
    parser.add_argument("--planners", nargs="+", default=["auto", *PUBLISHED])
    parser.add_argument("--seconds", nargs="+", type=float, default=[10.0])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.cpu:
        cpu_clock.use()
    kept = KeptRows(args.output, "planner_table", KEY)
    cases = [(p, h, s, gb) for p in args.profiles for h in args.hosts for s in args.ssds for gb in args.gb]
    for name, host, ssds, gb in cases:
        profile = Profile.read(PROFILES / f"{name}.profile.json.gz")
        machine_name = f"h100-{ssds}ssd{'' if host == 'yes' else '-nohost'}"
        machine = Machine.read(PROFILES / "machines" / f"{machine_name}.machine.json")
        for each in args.planners:
            for limit_s in [0.0] if each in PUBLISHED else args.seconds:
                key = (name, machine_name, gb, each, limit_s)
                if key in kept.known:
                    continue
                found = planned(profile, machine, gb * 10**9, each, limit_s)
                kept.add(key, found)
    print(table(kept.rows))


if __name__ == "__main__":
    main()
