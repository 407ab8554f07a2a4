"""Every operation of a training's drive fails, in every way: see tests/support/fault_loop.py.

    python tests/long/drive_faults.py [--stride 1] [--json FILE]

Prints a line per kind of fault: how many runs, how many of them ended right, with which errors. PASS: each
run ended with the numbers of a run without faults or with an error of ours, and the process trained on.
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
SILENT = ("flip", "stale", "neighbour")  # the drive says that all is well
LOST = ("drop", "stall")  # no answer comes, or none for long
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
LOST_MOST_S = 20  # of a training that gets no answer, and of the next one, with a deadline of 0.5 s
MOST = 10**4
LEAST = 2000  # runs that a fault hit, where each operation is tried


def runs(kind: str, op: str, how: str, first: int, stride: int) -> tuple[list[dict[str, Any]], str]:
    """Until no operation is left to fail; and how the process ended, if that was too early."""
    row = json.dumps([[kind, op, how, first, stride, MOST]])
    done = subprocess.run([sys.executable, str(CHILD), row], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    told = [line for line in lines if line.get("hits")]
    return told, "" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-2000:]}"


def right(run: dict[str, Any]) -> bool:
    ended = run["outcome"] == "same" or run["outcome"].endswith("Error")
    return ended and run["after"] == "same"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stride", type=int, default=1, help="every so many operations (1)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, rows, total, wrong, lost_s = time.monotonic(), [], 0, 0, [0.0]
    for place, (kind, op, how) in enumerate(ROWS):
        told, died = runs(kind, op, how, 1 + place % args.stride, args.stride)
        outcomes = Counter(run["outcome"] for run in told)
        bad = [run for run in told if not right(run)]
        total, wrong = total + len(told), wrong + len(bad) + bool(died)
        lost_s += [run["s"] for run in told if kind in LOST]
        rows.append({"kind": kind, "op": op, "how": how, "runs": len(told), "outcomes": outcomes, "bad": bad})
        print(f"{kind:>10} {op:>5} {how:>6} {len(told):>5} runs: {dict(outcomes)}", flush=True)
        for line in [*map(str, bad), *([died] if died else [])]:
            print(f"    {line}", flush=True)
    if args.json:
        told_s = round(time.monotonic() - began)
        args.json.write_text(
            json.dumps({"runs": total, "wrong": wrong, "s": told_s, "rows": rows}, indent=1) + "\n"
        )
    good = at_least("drive-faults-injected", total, LEAST if args.stride == 1 else 1)
    good &= exactly("drive-faults-wrong-or-hung", wrong)
    good &= at_most("drive-faults-lost-answers-longest-s", max(lost_s), LOST_MOST_S)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
