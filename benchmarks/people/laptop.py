"""Benchmark of docs/recipes/laptop.md: the model of examples/train_llama.py, plain and within a budget.

    python benchmarks/people/laptop.py [--steps 6] [-o FILE]

Each training runs in its own process with `inner="eager"`, the plain one with a budget that holds all
tensors. The figures are medians of the steps after the plan. Times depend on other load of the machine, so
the file has the load average.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versus"))

from race.result import RESULTS, write

BUDGET_MIB, PLAIN_MIB = 160, 2048
SEQUENCES, TOKENS = 8, 256


def train(memory: str, steps: int) -> dict[str, Any]:
    """Train in this process. Return the medians of the last steps."""
    import torch

    import teraio
    from teraio.cli.demo_model import Llama, Shape

    torch.manual_seed(0)
    model = Llama(Shape())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    options: dict[str, Any] = {
        "memory": memory,
        "inner": "eager",
        "planning": "inline",
        "warmup": 1,
        "updates": "step",
    }
    compiled = torch.compile(model, backend="teraio", options=options)
    found: list[tuple[float, int, int]] = []
    losses = []
    for _ in range(3 + steps):
        tokens = torch.randint(0, model.shape.vocabulary, (SEQUENCES, TOKENS + 1))
        began = time.perf_counter()
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        stats = teraio.stats()
        found.append((time.perf_counter() - began, stats["step_written_bytes"], stats["step_peak_bytes"]))
    seconds, written, peaks = (list(column) for column in zip(*found[-steps:], strict=True))
    return {"step_s": median(seconds), "written": median(written), "peak": max(peaks), "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--train", metavar="MEMORY", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "laptop.json")
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(args.train, args.steps)))
        return
    environment = {**os.environ, "TERAIO_CACHE_DIR": "off", "TERAIO_LOG": "warning"}
    ran = {}
    for mib in (PLAIN_MIB, BUDGET_MIB):
        command = [sys.executable, __file__, "--steps", str(args.steps), "--train", f"{mib}MiB"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        ran[mib] = json.loads(done.stdout.splitlines()[-1])
    plain, ours = ran[PLAIN_MIB], ran[BUDGET_MIB]
    assert plain["losses"] == ours["losses"]
    write(
        args.output,
        "laptop",
        load_average=round(os.getloadavg()[0], 1),
        budget_mib=BUDGET_MIB,
        tokens=SEQUENCES * TOKENS,
        plain_step_s=round(plain["step_s"], 3),
        plain_peak_bytes=plain["peak"],
        step_s=round(ours["step_s"], 3),
        peak_bytes=ours["peak"],
        written_bytes=int(ours["written"]),
    )


if __name__ == "__main__":
    main()
