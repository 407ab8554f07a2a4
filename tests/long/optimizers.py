"""A run of every optimizer and loop of tests/support/optimizer_loops.py, plain and under a budget.

    python tests/long/optimizers.py [names]

For each optimizer and loop, the script prints a row: (1) the tensors evicted between steps, (2) the fetches
on demand, and (3) a comparison with the plain run. The comparison covers losses, weights, states and groups.
The script exits with 1 if a row fails. A row takes some 3 s.
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
            evicted = ", ".join(f"{count} {kind}" for kind, count in sorted(row["away"].items()))
            peak = max(row["peaks"]) / 2**20
            print(
                f"{row['scenario']:22} {'same' if row['same'] else 'DIFFERENT':9} peak {peak:5.2f} MiB, "
                f"{row['buckets']:2} buckets, misses {row['counts']['misses']:4}, away: {evicted}",
                flush=True,
            )
    return 0 if exactly("optimizers-the-same", good, len(names)) else 1


if __name__ == "__main__":
    sys.exit(main())
