"""Many random schedules under the whole engine. No kernel may read too early or read poisoned bytes, and no
byte may exceed the budget.

    python tests/long/engine_schedules.py [--schedules 5000] [--first 200] [--collectives]

The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL. The script also
prints failed seeds. The call engine_run.run(seed, ...) repeats a failed run exactly.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from engine_run import run
from says import at_least, exactly

NAMED = 5  # number of failures that the script prints in full


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--first", type=int, default=200, help="the first seed")
    parser.add_argument("--collectives", action="store_true", help="let programs have collectives")
    args = parser.parse_args()
    done: Counter[str] = Counter()
    failed: list[int] = []
    with tempfile.TemporaryDirectory(prefix="teraio-schedules-") as folder:
        for seed in range(args.first, args.first + args.schedules):
            try:
                faults, one = run(seed, Path(folder), collectives=args.collectives)
            except Exception:  # noqa: BLE001  count this seed as failed, and try the next seed
                faults = [traceback.format_exc()]
            else:
                done.update(asdict(one.engine.mover.counts))
                done["wrong"] += len(one.world.faults)
                done["over"] += len(one.over)
            if (seed - args.first) % 500 == 499:
                print(f"{seed - args.first + 1} schedules, {len(failed)} failed", file=sys.stderr, flush=True)
            if faults:
                failed.append(seed)
                if len(failed) <= NAMED:
                    print(f"seed {seed}: {faults[0]}", file=sys.stderr)
    print(", ".join(f"{name} {value}" for name, value in sorted(done.items())), file=sys.stderr)
    good = exactly("engine-schedules-wrong-reads", done["wrong"])
    good &= exactly("engine-schedules-kernels-over-the-budget", done["over"])
    good &= exactly("engine-schedules-seeds-that-failed", len(failed))
    good &= at_least("engine-schedules-fetches", done["fetches"], 20 * args.schedules)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
