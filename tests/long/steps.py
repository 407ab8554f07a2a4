"""A run of thousands of training steps in which descriptors, threads, files and memory must not grow.

    python tests/long/steps.py [--steps 2000]

The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from says import as_it_is, at_most

CHILD = Path(__file__).resolve().parents[1] / "support" / "growth_train.py"
BUDGET_BYTES = 6_815_744  # half of the steps' peak
GROWTH_BYTES = 2 * 2**20  # for all steps together: allows the heap to vary, but no leak per step


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    request = json.dumps({"steps": args.steps, "budget": BUDGET_BYTES})
    ran = subprocess.run([sys.executable, str(CHILD), request], capture_output=True, text=True, check=False)
    if ran.returncode:
        print(ran.stderr[-3000:])
        return 1
    found = json.loads(ran.stdout)
    rows = found["rows"]
    third = len(rows) // 3
    figures = {
        name: max(row[name] for row in rows) - min(row[name] for row in rows)
        for name in ("descriptors", "threads", "files")
    }
    # Subtract the minimum of the first third of the steps from the minimum of the last third. The difference
    # shows growth and ignores variation.
    for name in ("resident", "peak"):
        figures[name] = min(row[name] for row in rows[-third:]) - min(row[name] for row in rows[:third])
    good = True
    as_it_is("steps-steps", args.steps)
    for name, value in figures.items():
        target = GROWTH_BYTES if name in {"resident", "peak"} else 0
        good &= at_most(f"steps-{name}-growth", value, target)
    print(f"steps-moved {found['did']['fetches']} fetches, {found['did']['evictions']} evictions")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
