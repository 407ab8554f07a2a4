"""Random training loops with late updates, against plain training.

    python tests/long/late_updates.py [--count 1000] [--first 0] [--jobs 2] [--works] [--backward]
                                      [--plant NAME] [--json FILE]

Each seed defines a model, its optimizers, a loop, what user code does between the steps, and the updates that
run late. All that user code sees must be equal, bit for bit: losses, weights, gradients, states, versions,
and the bytes of saved files. The script prints each failure, and exits with 1 if there is one. With
`--works`, user code also scales gradients, and asks for their norms, before the optimizers step. With
`--backward`, updates run in the backward, and a loop may end with the error that it breaks an assumption of
such updates. With `--plant`, it plants a bug, and exits with 1 if no seed detects it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from differential_sweep import sweep
from says import exactly

CHILD = Path(__file__).resolve().parents[1] / "support" / "late_run.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--works", action="store_true")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--plant", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    total: Counter[str] = Counter()
    bad = unstable = done = 0
    began = time.monotonic()
    file = args.json.open("w") if args.json else None
    seeds = range(args.first, args.first + args.count)
    request = {"plants": [args.plant], "works": args.works, "backward": args.backward}
    for result in sweep(seeds, args.jobs, 25, script=CHILD, **request):
        done += 1
        total.update(result.get("counts", {}))
        unstable += bool(result.get("unstable"))
        difference = result.get("difference", result.get("error", ""))
        if difference and not result.get("unstable"):
            bad += 1
            print(f"seed {result['seed']} ({result.get('what')}): {difference}", flush=True)
        if file is not None:
            file.write(json.dumps(result) + "\n")
            file.flush()
        if done % 50 == 0:
            print(f"{done} of {args.count}, {time.monotonic() - began:.0f} s, {dict(total)}", flush=True)
    print(f"{done} loops, {unstable} of them differ from themselves, {bad} differ; {dict(total)}")
    if args.plant:
        return 0 if bad else 1
    return 0 if exactly("late-loops-different", bad, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
