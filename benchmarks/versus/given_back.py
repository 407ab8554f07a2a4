"""What it costs on a CPU that freed memory goes back to the system, and what it saves to keep it.

    python benchmarks/versus/given_back.py [--subject llama-7m] [--part 0.6] [--steps 8] [--threads 2]

A row per training, each in a process of its own: plainly and within `--part` of the plain peak. Freed memory
is kept by malloc, given back at once, or kept within the budget, as teraio does it. Seconds of a step, the
peak of the process and of its tensors.
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

SETTLE = 8  # steps: compile, optimizer states, three that measure, the plan


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
            asked = {"subject": args.subject, "way": way, "threads": args.threads, "freed": freed}
            row = in_a_process({**asked, "memory": int(peak * args.part)}, args.steps)
            peak = peak or row["tensors"]
            table.row(way, freed, row["seconds"], fmt_bytes(row["resident"]), fmt_bytes(row["tensors"]))


def in_a_process(asked: dict[str, Any], steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(asked), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": FOUND, "TERAIO_CACHE_DIR": "off"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train(asked: dict[str, Any], steps: int) -> dict[str, Any]:
    from race.trainee import Trainee

    from teraio.runtime.device import limits

    if asked["freed"] == "given back":
        limits.make_malloc_return_memory()
    giving_back = limits.make_malloc_return_memory if asked["freed"] != "kept" else lambda: None
    with patch.object(limits, "make_malloc_return_memory", giving_back):
        trainee = Trainee({**asked, "spares": asked["freed"] == "in budget"})
        rows = [trainee.step() for _ in range(SETTLE + steps)][SETTLE:]
    return {
        "seconds": middle(rows, "seconds"),
        "resident": most(rows, "resident"),
        "tensors": most(rows, "tensors"),
    }


if __name__ == "__main__":
    main()
