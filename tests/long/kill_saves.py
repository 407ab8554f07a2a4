"""A run of `kill -9` in the middle of `teraio.save`, a hundred times at random moments.

    python tests/long/kill_saves.py [--kills 100] [--dir /mnt/ssd] [--seed 1]

After each kill the checkpoint file is whole: either the old file or the new file. At most one temporary file
exists beside the checkpoint, and the next save removes this temporary file. The script prints lines `name
value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from checkpoint_kill import kill_while_saving, numbered
from for_now import folder_for_now
from says import as_it_is, at_least, exactly

import teraio


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    root = args.dir or folder_for_now("kill-saves")
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
    as_it_is("kill-saves-kills", args.kills)
    good = [exactly(f"kill-saves-{name}", value) for name, value in figures.items()]
    good.append(at_least("kill-saves-versions-seen", len(numbers), 2))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
