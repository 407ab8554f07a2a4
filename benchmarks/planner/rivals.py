"""Predictions beside published figures: tokens per second of planned steps on machines that rivals measured.

    python benchmarks/planner/rivals.py [--cpu] [--times 1] [-o FILE]     plan each case that FILE lacks
    python benchmarks/planner/rivals.py --pages FILE                      write its tables into the pages

**Nothing ran on a GPU.** A roofline model gives the kernel times. Matrix products run at a part of the card's
dense peak, the efficiency. Other kernels move their bytes at 80 % of the card's memory bandwidth. Each launch
takes 4 us. A case has a machine file, a model, a step and an efficiency. The script plans the step with
`updates="auto"`, the default of runs. The figures of other systems are constants in rivals_published.py, each
with its source.

With `--cpu` time limits are in CPU seconds, for a machine with other load.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import cpu_clock
from kept_rows import KeptRows
from race.result import RESULTS
from rivals_published import CARDS, PUBLISHED, RECIPES, Case, Step, machine_of, work_of
from rivals_tables import PAGES, page_tables, with_tables

from teraio.errors import TeraioError
from teraio.formats import plan_check
from teraio.formats.machine import Machine
from teraio.formats.plan import Plan, moved_bytes_by_kind
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Profile
from teraio.passes.planner import planners
from teraio.passes.synth.profiles import ProfileRequest, synth
from teraio.passes.synth.roofline import Rates

KEY = ("machine", "model", "sequence", "batch", "micro_batches", "frozen", "efficiency_percent")


def held_bytes(plan: Plan, step: Profile) -> dict[str, int]:
    """Return the largest number of bytes that the plan keeps in each slow tier at one time."""
    moves, homes = plan_check._moves_and_homes_by_tensor(plan, step, [])
    change: dict[str, list[int]] = defaultdict(lambda: [0] * (len(step.kernels) + 1))
    for tensor in step.tensors:
        home = homes.get(tensor.name, "device")
        walk = plan_check._TensorWalk(tensor, step, home, moves.get(tensor.name, []))
        for tier, first, end in walk.copy_spans_by_tier():
            change[tier][first] += tensor.size_bytes
            change[tier][end] -= tensor.size_bytes
    return {tier: max(accumulate(column)) for tier, column in change.items()}


def profile_of(case: Case) -> Profile:
    card, step = CARDS[case.card], case.step
    flop = card.peak_flop_per_s * case.efficiency_percent // 100
    return synth(
        step.model,
        ProfileRequest(
            batch=step.batch,
            sequence=step.sequence,
            micro_batches=step.micro_batches,
            checkpoint=True,
            loss_chunks=step.loss_chunks,
            frozen=step.frozen,
            rates=Rates(flop, card.bandwidth_bytes_per_s * 8 // 10),
        ),
    )


def planned(case: Case, times: float) -> dict[str, Any]:
    """Plan the case. Return its row, or a row with the reason why there is no plan."""
    profile, machine = profile_of(case), machine_of(case)
    budget = memory_of(machine)
    limit_s = times * case.limit_s
    began = time.monotonic()
    try:
        made = planners.plan(profile, machine, budget, time_limit_s=limit_s, updates="auto")
    except TeraioError as error:
        return {"refused": str(error)}
    plan, step = apply_plan_changes(made, profile)
    held = held_bytes(plan, step)
    work = work_of(case.step.model, case.step.sequence, case.step.frozen)
    step_s = made.predicted.step_ns / 1e9
    tokens_per_s = case.step.tokens / step_s
    peak = CARDS[case.card].peak_flop_per_s
    return {
        "memory_bytes": budget,
        "step_ms": made.predicted.step_ns // 10**6,
        "bound_ms": made.predicted.bound_ns // 10**6,
        "compute_ms": profile.compute_ns // 10**6,
        "tokens_per_s": round(tokens_per_s, 1),
        "of_peak_percent": round(100 * tokens_per_s * work.flop_per_token / peak, 1),
        "host_bytes": held.get("host", 0),
        "ssd_bytes": held.get("ssd", 0),
        "ssd_written_bytes": sum(moved_bytes_by_kind(plan, step, "ssd", evict=True).values()),
        "ssd_read_bytes": sum(moved_bytes_by_kind(plan, step, "ssd", evict=False).values()),
        "ssd_capacity_bytes": next(tier.capacity_bytes for tier in machine.tiers if tier.name == "ssd"),
        "planning_s": round(time.monotonic() - began, 1),
    }


def memory_of(machine: Machine) -> int:
    """Return nine tenths of the device's memory, as the budget."""
    return next(tier.capacity_bytes for tier in machine.tiers if tier.name == "device") * 9 // 10


def key_of(case: Case) -> tuple[Any, ...]:
    step: Step = case.step
    shape = (step.model, step.sequence, step.batch, step.micro_batches, step.frozen)
    return (case.machine, *shape, case.efficiency_percent)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="limit the CPU time of planning")
    parser.add_argument("--times", type=float, default=1.0, help="factor of the time limits")
    parser.add_argument("--pages", type=Path, metavar="FILE", help="write the tables of these rows")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.pages:
        laptop = json.loads((RESULTS / "2026-11-30-laptop.json").read_text())
        tables = page_tables(json.loads(args.pages.read_text())["rows"], laptop)
        for page in PAGES:
            page.write_text(with_tables(page.read_text(), tables))
        return 0
    if args.cpu:
        cpu_clock.use()
    kept = KeptRows(args.output, "rivals", KEY)
    for case in dict.fromkeys((*RECIPES, *(case for each in PUBLISHED for case in each.cases))):
        if key_of(case) not in kept.known:
            kept.add(key_of(case), planned(case, args.times))
            kept.known.add(key_of(case))
    return 0


if __name__ == "__main__":
    sys.exit(main())
