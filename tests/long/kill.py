"""A run of `kill -9` on a store, a hundred times at random moments and at every named point.

    python tests/long/kill.py [--moments 100] [--times 3] [--dir /mnt/ssd] [--seed 1]

After each kill, all files that have names are empty, and no process holds the killed store's file open. The
next start of a store removes the names of files and directories that the killed store left. The store of
another process in the same directory still has its tensor. The script prints lines `name value target
PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from says import as_it_is, exactly
from store_rig import POINTS, Bystander, Left, disk_for, killed_at_moment, killed_at_point

# The number of names in the directory after a kill at each point. Between the points `created` and
# `unlinked`, the directory contains an empty file and the directory of that file.
NAMES = {"made": 1, "locked": 1, "created": 2, "unlinked": 1}


class Tally:
    """Counts over all kills, such as the names that remain after the next start. Each count must be 0."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bystander = Bystander(root)
        self.figures = dict.fromkeys(
            ("named-bytes", "names", "names-after-start", "held", "bystander-damaged"), 0
        )

    def count(self, names: int) -> None:
        left = Left(self.root)
        self.figures["named-bytes"] += left.named_bytes
        self.figures["names"] += max(0, left.names - names)
        self.figures["names-after-start"] += left.names_after_start
        self.figures["held"] += left.owners != {os.getpid()}
        self.figures["bystander-damaged"] += not self.bystander.intact()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    root = disk_for(args.dir, "kill")
    tally = Tally(root)
    random_ = random.Random(args.seed)
    for _ in range(args.moments):
        killed_at_moment(root, random_.uniform(0, 0.08))
        tally.count(max(NAMES.values()))
    for point in POINTS * args.times:
        killed_at_point(root, point)
        tally.count(NAMES.get(point, 0))
    tally.bystander.store.close()
    tally.figures["left-at-end"] = len(list(root.iterdir()))
    kills = args.moments + args.times * len(POINTS)
    as_it_is("kill-kills", kills)
    good = [exactly(f"kill-{name}", value) for name, value in tally.figures.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
