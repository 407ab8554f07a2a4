"""Benchmark of (1) a plan's predicted peak against an allocator's count, (2) the recompilations that plans
cause.

    python benchmarks/engine/peak.py [--inner inductor] [--layers 6] [--batch 8] [--length 256] [--steps 3]

A Llama with AdamW trains plainly, then with budgets that are parts of the plain peak. Each run with a budget
compiles the model once, measures steps and makes a plan. Later the run gets a second plan, for less memory.
Each plan gives a row. The row holds the budget, the predicted peak and the largest peak of the steps with
that plan. The row also holds the number of graphs that Dynamo had compiled (one for the plain model).

The predicted peak includes the reserve and the buffers of the store. `of tensors` excludes both. The script
compares `of tensors` with the measured peak. A lower measured peak means idle memory. A run may exceed `of
tensors`, but never the budget: an allocation waits if a late write still occupies its memory. The script
prints the table to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import counting_allocator
import torch
from torch._dynamo.utils import counters

import teraio
from teraio.cli.demo_model import Llama, Shape
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.options import Settings
from teraio.passes.planner import planners
from teraio.passes.planner.problem import problem
from teraio.runtime.device import limits
from teraio.session import session

PARTS = (1.0, 0.8, 0.6, 0.5)
WARMUP = 2
TOLERANCE = 0.02  # largest difference of measured and predicted peak that passes, as a share of the budget
HEAD = (
    f"{'budget':>10} {'plan':>12} {'moves':>5} {'predicted':>10} {'of tensors':>10} {'measured':>10} "
    f"{'off by':>8} graphs"
)


class Bench:
    """The model, compiled plainly and with slots. The run of every budget starts from the same weights."""

    def __init__(self, args: argparse.Namespace, counting: counting_allocator.Counting) -> None:
        self.args, self.counting = args, counting
        torch.manual_seed(0)
        self.model = Llama(Shape(layers=args.layers))
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        # `on_fallback` makes the options of the two compiled models differ. With equal options Dynamo would
        # use the first program for both.
        self.ours, self.plain = (
            torch.compile(self.model, backend="teraio", options={"inner": args.inner, **more})
            for more in ({}, {"on_fallback": "warn"})
        )

    def restart(self) -> None:
        teraio.reset()
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(1)
        gc.collect()
        self.others = self.counting.alive_bytes() - sum(p.nbytes for p in self.model.parameters())

    def steps(self, compiled: Any, count: int) -> int:
        """Run some steps and return their largest peak."""
        largest = 0
        for _ in range(count):
            size = (self.args.batch, self.args.length + 1)
            tokens = torch.randint(0, self.model.shape.vocabulary, size, generator=self.generator)
            self.counting.reset_peak()
            compiled(tokens[:, :-1], tokens[:, 1:]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            largest = max(largest, self.counting.peak_bytes() - self.others)
        return largest

    def plain_peak(self) -> int:
        os.environ["TERAIO_DISABLE"] = "1"
        self.restart()
        peak = self.steps(self.plain, 3)
        del os.environ["TERAIO_DISABLE"]
        return peak

    def under(self, budget: int, folder: Path) -> list[dict[str, Any]]:
        """Train with the budget. Return a row for the first plan, and a row for the plan that replaced it."""
        self.restart()
        path = folder / "run.profile.json"
        os.environ.update(
            TERAIO_MEMORY=str(budget),
            TERAIO_WARMUP=str(WARMUP),
            TERAIO_PROFILE=str(path),
            TERAIO_PLANNER="greedy",
            TERAIO_PLANNING="inline",
        )
        session.ensure_session(Settings.parse({"inner": self.args.inner}))
        running = session.SESSION
        assert running is not None
        made: list[Plan | None] = []
        settle = running.engine.settle_plan

        def noted(plan: Plan | None, order: tuple[str, ...] = ()) -> None:
            made.append(plan)
            settle(plan, order)

        running.engine.settle_plan = noted  # type: ignore[method-assign]
        self.steps(self.ours, 1)
        before = counters["stats"]["unique_graphs"]
        # Run one step more than the engine measures. When this step begins, the last measured step has ended,
        # and the engine begins to follow the plan.
        measuring = self.steps(self.ours, WARMUP + 2)
        plan = made[0]
        assert plan is not None, "no plan was made"
        rows = [self.row("measured", budget, plan, self.steps(self.ours, self.args.steps), before)]
        profile = Profile.read(path)
        less = (budget + problem.smallest_budget(profile)) // 2
        again = planners.plan(profile, running.planning.machine, less)
        running.engine.follow_plan(again)
        # This step moves tensors to the tiers of the second plan.
        self.steps(self.ours, 1)
        rows.append(self.row("planned anew", less, again, self.steps(self.ours, self.args.steps), before))
        rows[0]["measuring_peak_bytes"] = measuring
        return rows

    def row(self, what: str, budget: int, plan: Plan, measured: int, graphs_before: int) -> dict[str, Any]:
        assert session.SESSION is not None
        of_tensors = plan.predicted.peak_bytes - session.SESSION.engine.residency.reserve_bytes
        graphs = counters["stats"]["unique_graphs"]
        row = {
            "plan": what,
            "budget_bytes": budget,
            "moves": len(plan.moves),
            "predicted_peak_bytes": plan.predicted.peak_bytes,
            "predicted_of_tensors_bytes": of_tensors,
            "measured_peak_bytes": measured,
            "difference_bytes": measured - of_tensors,
            "graphs": graphs,
            "new_graphs": graphs - graphs_before,
        }
        sizes = " ".join(
            f"{row[name] / 2**20:>10.2f}"  # type: ignore[operator]
            for name in ("predicted_peak_bytes", "predicted_of_tensors_bytes", "measured_peak_bytes")
        )
        print(
            f"{budget / 2**20:>10.2f} {what:>12} {row['moves']:>5} {sizes} "
            f"{(measured - of_tensors) / of_tensors:>+8.2%} {graphs} (+{row['new_graphs']})",
            file=sys.stderr,
        )
        return row


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(limits.read_memory_limits().capacity_bytes / 2**30, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "torch": torch.__version__,
    }


def figures(rows: list[dict[str, Any]]) -> list[tuple[str, float, float, bool]]:
    """Return rows (name, value, target, passed)."""
    off = max(abs(row["difference_bytes"]) / row["budget_bytes"] for row in rows)
    short = max(-row["difference_bytes"] / row["budget_bytes"] for row in rows)
    over = max(row["measured_peak_bytes"] / row["budget_bytes"] for row in rows)
    new = sum(row["new_graphs"] for row in rows)
    return [
        ("off-by", round(off, 4), TOLERANCE, off <= TOLERANCE),
        ("below-predicted", round(short, 4), TOLERANCE, short <= TOLERANCE),
        ("measured-per-budget", round(over, 4), 1.0, over <= 1.0),
        ("new-graphs", new, 0, not new),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inner", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="steps measured with each plan")
    args = parser.parse_args()
    counting = counting_allocator.install_over_ours()
    torch.set_num_threads(1)
    bench = Bench(args, counting)
    peak = bench.plain_peak()
    print(f"plain: {peak / 2**20:.2f} MiB\n{HEAD}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="teraio-peak-") as folder:
        rows = [row for part in PARTS for row in bench.under(int(part * peak), Path(folder))]
    teraio.reset()
    result = {
        "benchmark": "peak",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "inner": args.inner,
        "plain_peak_bytes": peak,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    for name, value, target, passed in figures(rows):
        print(f"peak-{name} {value} {target} {'PASS' if passed else 'FAIL'}", file=sys.stderr)
    return int(not all(passed for *_, passed in figures(rows)))


if __name__ == "__main__":
    sys.exit(main())
