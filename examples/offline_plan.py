"""A training in three parts: measure a step, plan offline for this and other machines, and train with a plan.

Plans for other machines assume that kernels are as fast as on this machine. The last training follows the
plan for this machine. It neither measures nor plans.

python examples/offline_plan.py --memory 160MiB
python examples/offline_plan.py --memory 160MiB --machines h100-4ssd my.machine.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from side_by_side import arguments, equal, mib, sizes, table

import teraio
from teraio.cli.demo_model import Llama, Shape


def losses(args: argparse.Namespace, **options: str) -> Iterator[float]:
    torch.manual_seed(0)
    hidden = args.hidden
    model = Llama(Shape(args.vocabulary, hidden, hidden * 11 // 4, args.layers, args.heads, args.heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    settings = {"memory": args.memory, "inner": args.inner, **options}
    compiled = torch.compile(model, backend="teraio", options=settings)
    random = torch.Generator().manual_seed(1)
    for _ in range(args.steps):
        tokens = torch.randint(0, args.vocabulary, (args.batch, args.length + 1), generator=random)
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def run(*command: str) -> str:
    """Run one of teraio's commands, and print its command line. Return its output."""
    print("$ teraio", *(Path(word).name for word in command))
    done = subprocess.run(
        [sys.executable, "-m", "teraio", *command], text=True, stdout=subprocess.PIPE, check=True
    )
    return done.stdout


def make_plan(args: argparse.Namespace, profile: Path, machine: str, plan: Path) -> dict[str, Any]:
    command = ["plan", str(profile), "--machine", machine, "--memory", args.memory, "--json"]
    result: dict[str, Any] = json.loads(run(*command, "--planner", args.planner, "-o", str(plan)))
    return result


def main() -> None:
    parser = arguments(__doc__ or "", memory="160MiB", steps=7)
    parser.add_argument("--machines", nargs="*", default=["rtx4090-1ssd", "h100-4ssd"], help="names or files")
    parser.add_argument("--planner", default="auto")
    sizes(parser, vocabulary=4096, hidden=256, layers=6, heads=4, batch=8, length=256)
    args = parser.parse_args()
    torch.set_num_threads(1)  # with two threads, sums differ in the last bit from run to run

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        profile, here, plan = folder / "profile.json", folder / "here.machine.json", folder / "plan.json"
        measured = list(losses(args, profile=str(profile)))
        torch._dynamo.reset()
        run("doctor", "-o", str(here))
        for machine in [*args.machines, str(here)]:
            figures = make_plan(args, profile, machine, plan)
            step, bound, name = (
                figures["step_ns"],
                figures["bound_ns"],
                Path(machine).name.split(".")[0],
            )
            print(
                f"  {name:<16} within {mib(figures['memory_bytes'])}: step {step / 1e9:.3f} s, "
                f"bound {bound / 1e9:.3f} s, gap {step / bound - 1:.1%}"
            )
        ours, misses, took_ns = [], [], []
        # The file has the plan that was made last, for this machine.
        for loss in losses(args, plan=str(plan)):
            ours.append(loss)
            misses.append(teraio.stats()["step_misses"])
            took_ns.append(teraio.stats()["step_ns"])
    table(
        replayed_steps=str(args.steps - 1),
        step_predicted=f"{figures['step_ns'] / 1e9:.3f} s",
        step_replayed=f"{sorted(took_ns[2:])[len(took_ns[2:]) // 2] / 1e9:.3f} s",
        fetches_that_no_plan_asked_for=f"{misses[0]} in the first step, {misses[-1]} in the last",
        losses_equal_those_of_the_measured_run=equal(ours, measured),
    )


if __name__ == "__main__":
    main()
