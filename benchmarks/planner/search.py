"""What the search finds beyond greedy, how fast it looks, and what jitter does to its plans.

    python benchmarks/planner/search.py [--profiles NAME ...] [--gb 80 40] [--ssds 4 8] [--host]
                                        [--seconds 10] [--jitter-runs 10] [-o FILE]

Profiles are those of profiles/, machines those of profiles/machines/ with so many SSDs. Per row: the step of
greedy's best plan and the seconds for its whole portfolio; the step of `search` with a time limit of
`--seconds` for everything, the plans it simulated per second; by events, what a uniform jitter of 10 and 20 %
costs a step on average and at most, over so many seeds of eight steps each: on every kernel and transfer by
itself, and `by_step`, on all kernels of a step alike and on all transfers of a link in it. Events raise if
the plan's budget is exceeded at any time. Seconds are of CPU (cpu_clock.py). Prints rows as JSON; -o writes
them with date and machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cpu_clock

from teraio.formats.machine import Machine
from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.passes.planner.greedy.greedy import greedy_plans_with_periods
from teraio.passes.planner.problem.problem import build_problem
from teraio.passes.planner.search.search import STARTS, best_plan_from_starts
from teraio.passes.planner.simulate import event_simulation
from teraio.passes.planner.simulate.simulate import step_ns

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
JITTER_STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profiles", nargs="+", default=["llama-3.1-8b-b4", "llama-3.1-8b-b16"])
    parser.add_argument("--gb", nargs="+", type=int, default=[80, 40])
    parser.add_argument("--ssds", nargs="+", type=int, choices=(4, 8), default=[4, 8])
    parser.add_argument("--host", action="store_true", help="machines with a host tier")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--jitter-runs", type=int, default=10)
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    cpu_clock.use()
    rows = []
    for name in args.profiles:
        profile = Profile.read(PROFILES / f"{name}.profile.json.gz")
        for ssds in args.ssds:
            path = f"h100-{ssds}ssd{'' if args.host else '-nohost'}.machine.json"
            machine = Machine.read(PROFILES / "machines" / path)
            for gb in args.gb:
                rows.append(row(profile, machine, gb * 10**9, args.seconds, args.jitter_runs))
                print(json.dumps(rows[-1]), flush=True)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "seconds": args.seconds,
        "rows": rows,
    }
    if args.output:
        Path(args.output).write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")


def row(profile: Profile, machine: Machine, budget_bytes: int, seconds: float, runs: int) -> dict[str, Any]:
    problem = build_problem(profile, machine)
    begun = time.process_time()
    plans = sorted(greedy_plans_with_periods(problem, machine, budget_bytes, 0), key=lambda each: each[1])
    greedy_s = time.process_time() - begun
    told: list[tuple[float, int]] = []
    made = best_plan_from_starts(
        problem,
        machine,
        [plan for plan, _ in plans[:STARTS]],
        bound_ns=0,
        time_limit_s=seconds - greedy_s,
        progress=lambda _, count: told.append((time.process_time(), count)),
    )
    search_s = time.process_time() - begun
    assert check_plan_against_profile(made, profile, machine).feasible
    greedy_ns, search_ns = (
        event_simulation.simulate_by_events(plan, profile, machine).step_ns for plan in (plans[0][0], made)
    )
    looking_s = told[-1][0] - told[0][0] if len(told) > 1 else 0.0
    return {
        "profile": profile.name,
        "machine": machine.name,
        "budget_bytes": budget_bytes,
        "greedy_ns": greedy_ns,
        "greedy_s": round(greedy_s, 2),
        "search_ns": search_ns,
        "search_s": round(search_s, 2),
        "gain": round(1 - search_ns / greedy_ns, 4),
        "evaluations_per_s": round((told[-1][1] - told[0][1]) / looking_s) if looking_s else 0,
        "recurrence_off_by": round(step_ns(made, profile, machine) / search_ns - 1, 4)
        if event_simulation.has_contended_links(machine)
        else 0,
        "jitter": {
            f"{share:.0%}{' by_step' if by_step else ''}": jitter(
                made, profile, machine, share, by_step, runs
            )
            for share in (0.1, 0.2)
            for by_step in (False, True)
        },
    }


def jitter(
    plan: Plan, profile: Profile, machine: Machine, share: float, by_step: bool, runs: int
) -> dict[str, float]:
    """How much longer steps take; PlanError if the budget is ever exceeded."""
    plain_ns = event_simulation.simulate_by_events(plan, profile, machine).step_ns
    took = [
        event_simulation.simulate_by_events(
            plan, profile, machine, jitter=event_simulation.Jitter(share, seed, by_step), steps=JITTER_STEPS
        )
        for seed in range(runs)
    ]
    single = [ns / plain_ns - 1 for outcome in took for ns in outcome.took_ns[2:]]
    return {"mean": round(statistics.mean(single), 4), "max": round(max(single), 4)}


if __name__ == "__main__":
    main()
