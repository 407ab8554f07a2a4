"""A differential test: many generated models, each with many random plans, against plain training.

By default the script runs 2,000 models on the inner backend eager and 100 on Inductor. The script also runs
the models listed in `NAMED`, of which the test suite runs only a sample.

    python tests/long/differential.py [--eager 2000] [--inductor 100] [--plans 10] [--first 10000] [--jobs 2]
                                      [--named 1000] [--json results.jsonl]

The script prints each failure when it is found, a line of progress after every ten models, and the total
numbers of moves at the end. It exits with 1 if a model failed. To try a failed seed alone, run `python
tests/support/differential_run.py '{"seeds": [SEED]}'`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from differential_sweep import NAMED, complaints, sweep, totals
from says import at_least, exactly

MOST_BLOCKS = 4


def run(
    name: str,
    inner: str,
    seeds: Sequence[int],
    most_blocks: int,
    args: argparse.Namespace,
    file: TextIO | None,
) -> bool:
    began = time.monotonic()
    done: list[dict[str, Any]] = []
    request = {"inner": inner, "plans": args.plans, "most_blocks": most_blocks}
    for result in sweep(seeds, args.jobs, 40, **request):
        done.append(result)
        for line in complaints(result):
            print(line, flush=True)
        if result["unstable"]:
            print(f"seed {result['seed']}: plain training differs from itself in {result['unstable'][:5]}")
        if result["untraced"]:
            print(
                f"seed {result['seed']}: Dynamo does not trace it, plainly either: {result['untraced'][:200]}"
            )
        if file is not None:
            file.write(json.dumps({"inner": inner, **result}) + "\n")
            file.flush()
        if len(done) % 10 == 0:
            each = (time.monotonic() - began) / len(done)
            left = (len(seeds) - len(done)) * each / 60
            print(f"{name}: {len(done)} of {len(seeds)}, {left:.0f} min left, {totals(done)}", flush=True)
    print(f"{name}, all: {totals(done)}")
    good = at_least(f"differential-{name}-models", len(done), len(seeds))
    return (
        exactly(f"differential-{name}-other-numbers", sum(bool(complaints(each)) for each in done)) and good
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--eager", type=int, default=2000)
    parser.add_argument("--inductor", type=int, default=100)
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--first", type=int, default=10_000, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--named", type=int, default=1000, help="named models of each kind, at most")
    parser.add_argument("--json", type=argparse.FileType("w"), default=None)
    args = parser.parse_args()
    good = []
    for inner, named in NAMED.items():
        seeds = named.seeds[: args.named]
        good.append(run(f"{inner}-named", inner, seeds, named.most_blocks, args, args.json))
        drawn = range(args.first, args.first + getattr(args, inner))
        good.append(run(inner, inner, drawn, MOST_BLOCKS, args, args.json))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
