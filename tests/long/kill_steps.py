"""`kill -9` at random moments of training steps and of the saves between them.

    python tests/long/kill_steps.py [--kills 100] [--dir /mnt/ssd] [--seed 1]

The next process goes on from the last checkpoint, so the training is stopped and resumed as often. After each
kill weights and states in it are those of plain training without a stop, bit for bit, no file of the store is
left with bytes in it, and the next start finds no names. Prints `name value target PASS|FAIL`; exit code 0
or 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from interrupted import WARM, Training, killed
from store_rig import Left, disk_near


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = args.dir or disk_near(Path(tempfile.mkdtemp(prefix="teraio-kill-steps-")))
    if root is None:
        print("no disk here, only memory; give --dir")
        return 1
    chance = random.Random(args.seed)
    names = ("no-progress", "other-numbers", "named-bytes", "names-after-start", "alive")
    figures = dict.fromkeys(names, 0)
    plain, found, steps = Training(None), Training(None), 0
    for _ in range(args.kills):
        killed(root, chance)
        number = found.load(root / "last.pt")
        figures["no-progress"] += number < steps + WARM
        for step in range(steps, number):
            plain.step(step)
        steps = number
        left = Left(root / "store")
        figures["other-numbers"] += found.digest() != plain.digest()
        figures["named-bytes"] += left.named_bytes
        figures["names-after-start"] += left.names_after_start
        figures["alive"] += len(left.owners)
    print(f"kill-steps-kills {args.kills} {args.kills} PASS")
    for name, value in figures.items():
        print(f"kill-steps-{name} {value} 0 {'PASS' if value == 0 else 'FAIL'}")
    print(f"kill-steps-steps {steps}")
    return int(any(figures.values()))


if __name__ == "__main__":
    sys.exit(main())
