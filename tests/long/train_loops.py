"""A run of training loops that other people wrote. Each loop runs plainly and within a budget. Both runs must
give the same numbers.

    pip install accelerate peft lightning torchao
    python tests/long/train_loops.py [names]

The script prints a row per loop, and exits with 1 if a row fails. A row takes about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import trainers
import trainers_verdict
from says import as_it_is, at_least, exactly


def main() -> int:
    wrong, left_out, rows = 0, 0, sys.argv[1:] or trainers.ROWS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in rows:
            try:
                both = trainers_verdict.results(folder, [row])
            except ModuleNotFoundError as error:
                print(f"{row:20} left out: {error}", flush=True)
                left_out += 1
                continue
            plain, within = (both[mode][row] for mode in ("plain", "teraio"))
            found = trainers_verdict.faults(plain, within, trainers.MEMORY)
            counts = within["counts"]
            print(
                f"{row:20} peak {counts['peak_bytes']:>9} of {trainers.MEMORY}, {counts['fetches']} fetches, "
                f"{counts['touches']} of them by user code, overrun {counts['overrun_bytes']}: "
                f"{'; '.join(found) or 'the same'}",
                flush=True,
            )
            wrong += bool(found)
    as_it_is("train-loops-left-out", left_out)
    tried = at_least("train-loops-loops", len(rows) - left_out, 1)
    return 0 if exactly("train-loops-other-numbers-or-above-the-budget", wrong) and tried else 1


if __name__ == "__main__":
    sys.exit(main())
