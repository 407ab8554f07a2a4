"""Benchmark of the planner `search`: its gain over greedy plans, its speed, and the delay of its plans by
jitter.

    python benchmarks/planner/search.py [--profiles NAME ...] [--gb 80 40] [--ssds 4 8] [--host]
                                        [--seconds 10] [--jitter-runs 10] [-o FILE]

Profiles come from profiles/, machines from profiles/machines/ with the given number of SSDs. A row holds:

greedy        the step time of the best greedy plan, and the seconds that making all greedy plans takes
search        the step time of the search's plan, and the number of plans simulated per second. `--seconds`
              limits greedy plans and search together
jitter        the mean and largest delay of a step when kernels and transfers take up to 10 or 20 % longer or
              shorter. `--jitter-runs` seeds give eight steps each. Each kernel and transfer has its own
              jitter. In `by_step` all kernels of a step have one jitter, and so have all transfers of a link

An event simulation gives the step times. It raises an error if the plan ever exceeds its budget. Seconds are
CPU seconds (cpu_clock.py). The script prints the rows as JSON. With -o it writes the rows to a file, with
date and machine.
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
    progress: list[tuple[float, int]] = []
    made = best_plan_from_starts(
        problem,
        machine,
        [plan for plan, _ in plans[:STARTS]],
        bound_ns=0,
        time_limit_s=seconds - greedy_s,
        progress=lambda _, count: progress.append((time.process_time(), count)),
    )
    search_s = time.process_time() - begun
    assert check_plan_against_profile(made, profile, machine).feasible
    greedy_ns, search_ns = (
        event_simulation.simulate_by_events(plan, profile, machine).step_ns for plan in (plans[0][0], made)
    )
    looking_s = progress[-1][0] - progress[0][0] if len(progress) > 1 else 0.0
    return {
        "profile": profile.name,
        "machine": machine.name,
        "budget_bytes": budget_bytes,
        "greedy_ns": greedy_ns,
        "greedy_s": round(greedy_s, 2),
        "search_ns": search_ns,
        "search_s": round(search_s, 2),
        "gain": round(1 - search_ns / greedy_ns, 4),
        "evaluations_per_s": round((progress[-1][1] - progress[0][1]) / looking_s) if looking_s else 0,
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
    """Return the mean and the largest delay of a step by jitter, as a share of the step without jitter. Raise
    `PlanError` if a step exceeds the budget.
    """
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
