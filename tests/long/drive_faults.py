"""A run of trainings with faults of the drive. Every operation of the drive fails in every way.
tests/support/fault_loop.py runs each training.

    python tests/long/drive_faults.py [--stride 1] [--json FILE]

The script prints a line per kind of fault, with the number of runs and how they ended. PASS means that each
run ended in one of two ways: (1) with the numbers of a run without faults, or (2) with an error of teraio. In
both cases, another training in the same process must have given the right numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from says import at_least, at_most, exactly

CHILD = Path(__file__).resolve().parents[1] / "support" / "fault_loop.py"
SILENT = ("flip", "stale", "neighbour")  # after one of these faults, the drive still reports success
LOST = ("drop", "stall")  # the drive does not answer, or answers very late
ROWS = [
    *(
        (kind, op, how)
        for kind in ("EIO", "short", *SILENT)
        for op in ("read", "write")
        for how in ("once", "sticky")
    ),
    *(("ENOSPC", "write", how) for how in ("once", "sticky")),
    *((kind, op, "once") for kind in (*LOST, "delay") for op in ("read", "write")),
    *(("delay", op, "sticky") for op in ("read", "write")),
]
# The longest time in seconds of two trainings together: one whose drive does not answer, and the next one.
# The deadline of an operation is 0.5 s.
LOST_MOST_S = 20
MOST = 10**4
LEAST = 2000  # least number of runs in which an operation failed, with stride 1


def runs(kind: str, op: str, how: str, first: int, stride: int) -> tuple[list[dict[str, Any]], str]:
    """Run a training for each operation to fail: number `first`, then `first + stride`, and so on.

    Return a pair: the runs in which an operation failed, and the error that ended the process, if there was
    one.
    """
    row = json.dumps([[kind, op, how, first, stride, MOST]])
    done = subprocess.run([sys.executable, str(CHILD), row], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    hit_runs = [line for line in lines if line.get("hits")]
    return hit_runs, "" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-2000:]}"


def right(run: dict[str, Any]) -> bool:
    ended = run["outcome"] == "same" or run["outcome"].endswith("Error")
    return ended and run["after"] == "same"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stride", type=int, default=1, help="fail every n-th operation (1)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, rows, total, wrong, lost_s = time.monotonic(), [], 0, 0, [0.0]
    for place, (kind, op, how) in enumerate(ROWS):
        hit_runs, died = runs(kind, op, how, 1 + place % args.stride, args.stride)
        outcomes = Counter(run["outcome"] for run in hit_runs)
        bad = [run for run in hit_runs if not right(run)]
        total, wrong = total + len(hit_runs), wrong + len(bad) + bool(died)
        lost_s += [run["s"] for run in hit_runs if kind in LOST]
        rows.append(
            {"kind": kind, "op": op, "how": how, "runs": len(hit_runs), "outcomes": outcomes, "bad": bad}
        )
        print(f"{kind:>10} {op:>5} {how:>6} {len(hit_runs):>5} runs: {dict(outcomes)}", flush=True)
        for line in [*map(str, bad), *([died] if died else [])]:
            print(f"    {line}", flush=True)
    if args.json:
        took_s = round(time.monotonic() - began)
        args.json.write_text(
            json.dumps({"runs": total, "wrong": wrong, "s": took_s, "rows": rows}, indent=1) + "\n"
        )
    good = at_least("drive-faults-injected", total, LEAST if args.stride == 1 else 1)
    good &= exactly("drive-faults-wrong-or-hung", wrong)
    good &= at_most("drive-faults-lost-answers-longest-s", max(lost_s), LOST_MOST_S)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
