"""A run in which an alarm's signal handler reads weights and optimizer states at random moments of training
and inference.

    python tests/long/signals.py [--count 1000] [--seed 1]

The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from says import as_it_is, exactly

CHILD = Path(__file__).resolve().parents[1] / "support" / "signalled.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    good = True
    for does in ("train", "infer"):
        command = [sys.executable, str(CHILD), does, str(args.count), str(args.seed)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        good &= exactly(f"signals-{does}-ended-badly", ran.returncode)
        found = json.loads(ran.stdout) if ran.returncode == 0 else {}
        good &= exactly(f"signals-{does}-called", args.count - found.get("left", args.count), args.count)
        for what in ("wrong", "errors", "torn"):
            good &= exactly(f"signals-{does}-{what}", found.get(what, -1))
        as_it_is(f"signals-{does}-steps", found.get("steps", 0))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
