"""Benchmark of the places of updates: a training with updates at `step()`, and the same training with updates
in the next forward, or in the backward.

    python benchmarks/engine/late.py [--millions 32] [--shares 40 25 0] [--batch 4] [--length 128]
                                     [--rounds 2] [--steps 8] [--updates step late backward auto]
                                     [--inner inductor] [--hooks] [--clip]

A Llama of about this many parameters trains with AdamW. Its budget is a share of the peak of plain training,
in percent; 0 is the smallest budget. Each training runs in a process of its own, and they take turns. With
`--hooks`, each weight has an optimizer of its own, which steps in a hook on the weight's gradient. With
`--clip`, the loop clips the norm of all gradients. The figures of a row are medians over the last `--steps`
planned steps of all rounds:

step       time from one forward to the next, and its ratio to plain training
optimizer  the part of this time in which `step()` waits for transfers, in percent
moved      bytes written and read per step
bound      the bound of the plan, and the step's ratio to it
planned    the share of the owed updates that ran at their slots; null if no update was owed
in_backward  updates per step that ran in the backward
tried      whether the run owed updates at any time

With `auto`, the steps count only after the run has decided which kind of step it keeps.

The script prints a table to stderr, and one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

SHAPES = {  # millions of parameters: (vocabulary, hidden, intermediate, layers, heads)
    3: (1024, 192, 512, 6, 4),
    9: (4096, 256, 704, 8, 4),
    32: (8192, 512, 1376, 8, 8),
    175: (16384, 1024, 2752, 12, 16),
    554: (32000, 1536, 4096, 16, 16),
}
WARM_STEPS = 100  # a training ends if it has no plan after this many steps


def make_model(millions: int) -> tuple[int, torch.nn.Module]:
    """Return the vocabulary's size, and a Llama of about this many million parameters."""
    from teraio.cli.demo_model import Llama, Shape

    vocabulary, hidden, intermediate, layers, heads = SHAPES[millions]
    torch.manual_seed(0)
    return vocabulary, Llama(Shape(vocabulary, hidden, intermediate, layers, heads, max(1, heads // 2)))


class HookedSteps:
    """One optimizer per weight, which steps as soon as autograd has accumulated the weight's gradient."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizers = {p: torch.optim.AdamW([p], lr=1e-4) for p in model.parameters()}
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self._step_of)

    def _step_of(self, parameter: torch.Tensor) -> None:
        own: Any = self.optimizers
        own[parameter].step()
        own[parameter].zero_grad()

    def step(self) -> None:
        """Do nothing: the hooks have stepped."""

    zero_grad = step


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process. `args.mode` is `plain`, or a value of the option `updates`."""
    import teraio
    from teraio.runtime.device import rss

    vocabulary, model = make_model(args.millions)
    optimizer: Any = HookedSteps(model) if args.hooks else torch.optim.AdamW(model.parameters(), lr=1e-4)
    if args.mode == "plain":
        os.environ["TERAIO_DISABLE"] = "1"
    options = {"memory": args.memory, "inner": args.inner, "updates": "step"}
    if args.mode != "plain":
        options["updates"] = args.mode
    call: Any = torch.compile(model, backend="teraio", options=options)
    data = torch.Generator().manual_seed(1)
    took, waits, losses, rows, planned = [], [], [], [], 0
    for _ in range(WARM_STEPS + args.steps):
        tokens = torch.randint(0, vocabulary, (args.batch, args.length + 1), generator=data)
        began = time.perf_counter()
        loss = call(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = 0 if args.mode == "plain" else teraio.stats()["stall_ns"]
        optimizer.step()
        stats: dict[str, Any] = {} if args.mode == "plain" else {**teraio.stats()}
        waits.append(0 if args.mode == "plain" else stats["stall_ns"] - before)
        optimizer.zero_grad()
        losses.append(loss.item())
        took.append(time.perf_counter() - began)
        rows.append(stats)
        is_settled = args.mode == "plain" or stats["steady"]
        planned = planned + 1 if is_settled else 0
        if planned >= args.steps + 4:
            break
    last = slice(-args.steps, None)
    result: dict[str, Any] = {
        "mode": args.mode,
        "took_s": took[last],
        "waits_s": [each / 1e9 for each in waits[last]],
        "losses": losses[: args.steps + 4],  # as many as plain training has
        "planned": planned,
        "peak_bytes": rss.peak_bytes(),
    }
    if args.mode != "plain":
        first, end = rows[-args.steps - 1], rows[-1]
        names = ["written_bytes", "read_bytes", "owed_updates", "late_updates", "settled_updates", "misses"]
        names += ["backward_updates"]
        result |= {name: end[name] - first[name] for name in names}
        result["tried"] = end["owed_updates"] > 0
        result |= {n: end.get(n) for n in ("bound_ns", "predicted_step_ns", "budget_bytes", "overrun_bytes")}
    return result


def run_child(args: argparse.Namespace, mode: str, memory: str) -> dict[str, Any]:
    names = ("millions", "batch", "length", "steps", "inner", "threads", "hooks", "clip")
    flags = {"mode": mode, "memory": memory, **{name: getattr(args, name) for name in names}}
    return run_script(__file__, flags, f"{mode} {memory}", TORCHINDUCTOR_CACHE_DIR=args.cache)


def run_script(script: str, flags: dict[str, Any], what: str, **environ: str) -> dict[str, Any]:
    """Run a training in a new process, without the plan cache. Return the object that it prints last."""
    command = [sys.executable, script]
    for name, value in flags.items():
        if value is not False:
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    environ = {**os.environ, "TERAIO_CACHE_DIR": "off", **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{what}: {done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(runs: list[dict[str, Any]], plain_s: float, steps: int) -> dict[str, Any]:
    step_s = statistics.median(t for run in runs for t in run["took_s"])
    wait_s = statistics.median(t for run in runs for t in run["waits_s"])
    end = runs[-1]
    bound_s = (end["bound_ns"] or 0) / 1e9
    owed = sum(run["owed_updates"] for run in runs)
    return {
        "step_s": round(step_s, 4),
        "x_plain": round(step_s / plain_s, 3),
        "optimizer_waits_percent": round(100 * wait_s / step_s, 2),
        "written_bytes": end["written_bytes"] // steps,
        "read_bytes": end["read_bytes"] // steps,
        "bound_s": round(bound_s, 4),
        "x_bound": round(step_s / bound_s, 3) if bound_s else None,
        "planned_percent": round(100 * sum(run["late_updates"] for run in runs) / owed, 1) if owed else None,
        "in_backward": end["backward_updates"] / steps,
        "tried": end["tried"],
        "misses": end["misses"] / steps,
        "planned_steps": end["planned"],
        "budget_bytes": end["budget_bytes"],
        "overrun_bytes": end["overrun_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, choices=sorted(SHAPES), default=32)
    parser.add_argument("--shares", type=int, nargs="+", default=[40, 25, 0])
    parser.add_argument("--updates", nargs="+", default=["step", "late", "backward", "auto"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hooks", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--mode", default="")
    parser.add_argument("--memory", default="")
    parser.add_argument("--cache", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.mode:
        print(json.dumps(train(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.cache = args.cache or folder
        plain = run_child(args, "plain", "80%")
        peak = plain["peak_bytes"]
        table = []
        for share in args.shares:
            memory = f"{peak * share // 100}" if share else "min"
            runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.updates}
            plains = []
            for _ in range(args.rounds):
                plains.append(run_child(args, "plain", "80%"))
                for mode in args.updates:
                    runs[mode].append(run_child(args, mode, memory))
            plain_s = statistics.median(t for run in plains for t in run["took_s"])
            for mode in args.updates:
                row = {"share": share, "updates": mode, **row_of(runs[mode], plain_s, args.steps)}
                row["equal"] = all(run["losses"] == plains[0]["losses"] for run in runs[mode])
                table.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    names = ("millions", "batch", "length", "inner", "threads", "hooks", "clip")
    print(json.dumps({**{name: getattr(args, name) for name in names}, "rows": table}))


if __name__ == "__main__":
    main()
