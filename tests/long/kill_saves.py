"""`kill -9` in the middle of `teraio.save`, a hundred times at random moments.

    python tests/long/kill_saves.py [--kills 100] [--dir /mnt/ssd] [--seed 1]

After each kill the file is whole, the old one or the new one, and at most one temporary file is beside it,
which the next save removes. Prints `name value target PASS|FAIL`; exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint_kill import kill_while_saving, numbered

import teraio


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    root = args.dir or Path(tempfile.mkdtemp(prefix="teraio-kill-saves-"))
    path = root / "checkpoint.pt"
    teraio.save(numbered(0), path)
    random_ = random.Random(args.seed)
    torn = crowded = 0
    numbers = set()
    for _ in range(args.kills):
        number = kill_while_saving(path, random_.uniform(0.02, 0.2))
        torn += number < 0
        crowded += len(os.listdir(root)) > 2
        numbers.add(number)
    teraio.save(numbered(0), path)
    figures = {"torn": torn, "crowded": crowded, "left-at-end": len(os.listdir(root)) - 1}
    print(f"kill-saves-kills {args.kills} {args.kills} PASS")
    print(f"kill-saves-versions-seen {len(numbers)} >1 {'PASS' if len(numbers) > 1 else 'FAIL'}")
    for name, value in figures.items():
        print(f"kill-saves-{name} {value} 0 {'PASS' if value == 0 else 'FAIL'}")
    return int(any(figures.values()) or len(numbers) < 2)


if __name__ == "__main__":
    sys.exit(main())
