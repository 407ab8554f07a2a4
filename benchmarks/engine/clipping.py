"""Benchmark of what loops do to gradients before the step: clipping, GradScaler, accumulation.

    python benchmarks/engine/clipping.py [--millions 9] [--share 25] [--loops LOOP ...] [--inner eager]
                                         [--updates step] [--rounds 2] [--steps 6] [--json FILE]

A Llama trains with AdamW, in a budget of a share of the peak of plain training, in percent; 0 is the smallest
budget. Each training runs in a process of its own. The figures of a row are medians over the last `--steps`
steady steps of all rounds:

read, written   bytes of the store per step
x nothing       read bytes, compared with the same loop without this work on gradients
before          read bytes with TERAIO_WITHOUT=gradient_calls: each norm and each scaling fetches the gradient
misses          fetches per step that were in no plan
equal           the losses and all weights equal plain training, bit for bit

The script prints a table to stderr, and one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from late import SHAPES, WARM_STEPS, make_model, run_script

Work = Callable[[nn.Module], None]


def nothing(model: nn.Module) -> None:
    """Do nothing to the gradients."""


def clips(foreach: bool | None) -> Work:
    def work(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)

    return work


def clips_values(foreach: bool | None) -> Work:
    return lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-4, foreach=foreach)


def clips_by_own_code(model: nn.Module) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    total = sum(g.data.norm(2).item() ** 2 for g in gradients) ** 0.5
    for gradient in gradients:
        gradient.data.mul_(min(1.0, 0.1 / (total + 1e-6)))


# Each loop -> its work on gradients, its number of batches per step, and whether it has a GradScaler.
LOOPS: dict[str, tuple[Work, int, bool]] = {
    "nothing": (nothing, 1, False),
    "norm": (clips(None), 1, False),
    "norm, single": (clips(False), 1, False),
    "norm, own code": (clips_by_own_code, 1, False),
    "value": (clips_values(None), 1, False),
    "value, single": (clips_values(False), 1, False),
    "scaler": (nothing, 1, True),
    "scaler and norm": (clips(None), 1, True),
    "scaler and norm, single": (clips(False), 1, True),
    "accumulation": (nothing, 2, False),
    "accumulation and norm": (clips(None), 2, False),
    "norm, a gradient is None": (clips(None), 1, False),
    "norm, a gradient is infinite": (clips(None), 1, False),
}


def base_of(loop: str) -> str:
    """Return the loop without work on gradients that has the same number of batches."""
    return "accumulation" if LOOPS[loop][1] > 1 else "nothing"


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process. `args.memory` is empty for plain training."""
    import teraio
    from teraio.runtime.device import rss

    plain = not args.memory
    if plain:
        os.environ["TERAIO_DISABLE"] = "1"
    vocabulary, model = make_model(args.millions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {"memory": args.memory or "80%", "inner": args.inner, "updates": args.updates}
    call: Any = torch.compile(model, backend="teraio", options=options)
    work, batches, scales = LOOPS[args.loop]
    scaler = torch.amp.GradScaler("cpu", enabled=scales, init_scale=2.0**10)
    data = torch.Generator().manual_seed(1)
    rows: list[dict[str, Any]] = []
    took, losses, planned = [], [], 0
    last = list(model.parameters())[-1]
    for step in range(args.count or WARM_STEPS):
        began = time.perf_counter()
        for _ in range(batches):
            tokens = torch.randint(0, vocabulary, (args.batch, args.length + 1), generator=data)
            loss = call(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            scaler.scale(loss).backward()
        if scales:
            scaler.unscale_(optimizer)
        if "is None" in args.loop and step % 2:
            last.grad = None
        if "infinite" in args.loop and step == 2 and last.grad is not None:
            last.grad.view(-1)[:1].fill_(float("inf"))
        work(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        took.append(time.perf_counter() - began)
        if plain:
            continue
        rows.append({**teraio.stats()})
        planned = planned + 1 if rows[-1]["steady"] else 0
        if planned > args.steps + 2:
            break
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    result: dict[str, Any] = {"count": len(losses), "losses": losses, "weights": digest.hexdigest()}
    result |= {"took_s": took[-args.steps :], "peak_bytes": rss.peak_bytes()}
    for name in () if plain else ("read_bytes", "written_bytes", "misses", "touches", "owed_scalings"):
        values = [int(row[name]) for row in rows[-args.steps - 1 :]]
        result[name] = [after - before for before, after in pairwise(values)]
    return result


def run_child(args: argparse.Namespace, loop: str, memory: str, count: int = 0, **environ: str) -> Any:
    names = ("millions", "batch", "length", "steps", "inner", "updates", "threads")
    flags = {"loop": loop, "memory": memory, "count": count}
    flags |= {name: getattr(args, name) for name in names}
    return run_script(__file__, flags, f"{loop} {memory}", TORCHINDUCTOR_CACHE_DIR=args.cache, **environ)


def measure(args: argparse.Namespace, loop: str, memory: str) -> dict[str, Any]:
    ours, before = [], []
    for _ in range(args.rounds):
        ours.append(run_child(args, loop, memory))
        before.append(run_child(args, loop, memory, TERAIO_WITHOUT="gradient_calls"))
    row: dict[str, Any] = {"loop": loop}
    for name in ("read_bytes", "written_bytes", "misses", "touches", "owed_scalings", "took_s"):
        row[name] = round(statistics.median(v for run in ours for v in run[name]), 4)
    row["before_read_bytes"] = round(statistics.median(v for run in before for v in run["read_bytes"]))
    row["before_took_s"] = round(statistics.median(v for run in before for v in run["took_s"]), 4)
    plains = {count: run_child(args, loop, "", count) for count in {run["count"] for run in (*ours, *before)}}
    row["equal"] = all(
        run[name] == plains[run["count"]][name] for run in (*ours, *before) for name in ("losses", "weights")
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, choices=sorted(SHAPES), default=9)
    parser.add_argument("--share", type=int, default=25)
    parser.add_argument("--loops", nargs="+", choices=sorted(LOOPS), default=list(LOOPS))
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--inner", default="eager")
    parser.add_argument("--updates", default="step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--loop", default="")
    parser.add_argument("--memory", default="")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--cache", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.loop:
        print(json.dumps(train(args)))
        return
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        args.cache = args.cache or folder
        peak = run_child(args, "nothing", "", 4)["peak_bytes"]
        memory = f"{peak * args.share // 100}" if args.share else "min"
        loops = sorted(args.loops, key=lambda loop: loop != base_of(loop))  # the loops without work first
        for loop in loops:
            row = measure(args, loop, memory)
            table.append(row)
            base = next((each["read_bytes"] for each in table if each["loop"] == base_of(loop)), 0)
            row["x_nothing"] = round(row["read_bytes"] / base, 3) if base else None
            row["before_x_nothing"] = round(row["before_read_bytes"] / base, 3) if base else None
            print(json.dumps(row), file=sys.stderr, flush=True)
    shape = {
        name: getattr(args, name) for name in ("millions", "share", "batch", "length", "inner", "updates")
    }
    found = json.dumps({**shape, "memory": memory, "rows": table})
    print(found)
    if args.json:
        args.json.write_text(found + "\n")


if __name__ == "__main__":
    main()
