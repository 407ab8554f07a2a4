"""Every optimizer and loop of tests/support/optimizer_loops.py, plainly and under a budget.

    python tests/long/optimizers.py [names]

Prints a row each: what is away between steps, what was fetched on demand, and whether losses, weights, states
and groups are those of the plain run. Exit code 0 or 1. Some 3 s per row.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from optimizer_loops import LOOPS, OPTIMIZERS
from says import exactly

CHILD = Path(__file__).resolve().parents[1] / "support" / "optimizer_train.py"


def main() -> int:
    names = sys.argv[1:] or sorted({*LOOPS, *OPTIMIZERS})
    command = [sys.executable, str(CHILD), json.dumps(names)]
    good = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            row = json.loads(line)
            good += row["same"]
            away = ", ".join(f"{count} {kind}" for kind, count in sorted(row["away"].items()))
            peak = max(row["peaks"]) / 2**20
            print(
                f"{row['scenario']:22} {'same' if row['same'] else 'DIFFERENT':9} peak {peak:5.2f} MiB, "
                f"{row['buckets']:2} buckets, misses {row['counts']['misses']:4}, away: {away}",
                flush=True,
            )
    return 0 if exactly("optimizers-the-same", good, len(names)) else 1


if __name__ == "__main__":
    sys.exit(main())
