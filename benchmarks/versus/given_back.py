"""Benchmark of three treatments of freed memory on a CPU, from keeping it to returning it to the system.

    python benchmarks/versus/given_back.py [--subject llama-7m] [--part 0.6] [--steps 8] [--threads 2]

Each training runs in its own process and gives a row. Trainings are plain, or have a budget of `--part` of
the plain peak. Freed memory has one of three treatments: (1) malloc keeps it, (2) malloc returns it
immediately, (3) teraio's allocator keeps it if the budget has room. Plain training has only the treatments
(1) and (2). A row holds the seconds of a step, the peak of the process and the peak of its tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

from race.pairs import FOUND, middle, most
from race.result import Table

from teraio.units import fmt_bytes

SETTLE = 8  # steps before timing: compile, optimizer states, three measured steps, planning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--subject", default="llama-7m")
    parser.add_argument("--part", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(train(json.loads(args.child), args.steps)))
        return
    table = Table(way=8, freed=10, step=7, process=10, tensors=10)
    peak = 0
    for way in ("plain", "teraio"):
        for freed in ("kept", "given back", "in budget"):
            if (way, freed) == ("plain", "in budget"):
                continue
            request = {"subject": args.subject, "way": way, "threads": args.threads, "freed": freed}
            row = in_a_process({**request, "memory": int(peak * args.part)}, args.steps)
            peak = peak or row["tensors"]
            table.row(way, freed, row["seconds"], fmt_bytes(row["resident"]), fmt_bytes(row["tensors"]))


def in_a_process(request: dict[str, Any], steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(request), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": FOUND, "TERAIO_CACHE_DIR": "off"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train(request: dict[str, Any], steps: int) -> dict[str, Any]:
    from race.trainee import Trainee

    from teraio.runtime.device import limits

    if request["freed"] == "given back":
        limits.make_malloc_return_memory()
    giving_back = limits.make_malloc_return_memory if request["freed"] != "kept" else lambda: None
    with patch.object(limits, "make_malloc_return_memory", giving_back):
        trainee = Trainee({**request, "spares": request["freed"] == "in budget"})
        rows = [trainee.step() for _ in range(SETTLE + steps)][SETTLE:]
    return {
        "seconds": middle(rows, "seconds"),
        "resident": most(rows, "resident"),
        "tensors": most(rows, "tensors"),
    }


if __name__ == "__main__":
    main()
