"""A run of `kill -9` at random moments of training steps and of the saves between them.

In the last part, the system's kernel kills the process, because its control group runs out of memory. This
part needs root. Without root the script reports it as left out.

    python tests/long/kill_steps.py [--kills 100] [--out-of-memory 20] [--dir /mnt/ssd] [--seed 1]

After each kill, another process resumes from the last checkpoint. The checkpoint's weights and optimizer
states must be bitwise equal to the weights and states of an uninterrupted training without teraio. All files
that the killed store left are empty, and the next start of a store removes them. The script prints lines
`name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import control_group
from interrupted import WARM, Training, killed
from says import as_it_is, at_least, exactly
from store_rig import Left, disk_for


class Resumed:
    """A training that is killed and resumed. `figures` counts problems after all kills, and each count must
    be 0.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.chance, self.steps = root, random.Random(seed), 0
        self.plain, self.found = Training(None), Training(None)
        names = ("no-progress", "other-numbers", "named-bytes", "names-after-start", "alive")
        self.figures = dict.fromkeys(names, 0)

    def end(self, *how: Any) -> None:
        killed(self.root, self.chance, *how)
        number = self.found.load(self.root / "last.pt")
        self.figures["no-progress"] += number < self.steps + WARM
        for step in range(self.steps, number):
            self.plain.step(step)
        self.steps = number
        left = Left(self.root / "store")
        self.figures["other-numbers"] += self.found.digest() != self.plain.digest()
        self.figures["named-bytes"] += left.named_bytes
        self.figures["names-after-start"] += left.names_after_start
        self.figures["alive"] += len(left.owners)


def out_of_memory(training: Resumed, times: int) -> bool:
    """Let the system's kernel kill the process for lack of memory. Return False if this happened fewer than
    `times` times.
    """
    reason = control_group.reason_without()
    if reason or not times:
        print(f"left out  the kernel's own kills: {reason or 'none were requested'}")
        return True
    with control_group.group("teraio-kill-steps") as group:
        for _ in range(times):
            training.end(group.first, partial(control_group.run_out_of_memory, group))
        ended = group.killed
    return at_least("kill-steps-out-of-memory", ended, times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--out-of-memory", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = disk_for(args.dir, "kill-steps")
    training = Resumed(root, args.seed)
    for _ in range(args.kills):
        training.end()
    as_it_is("kill-steps-kills", args.kills)
    good = [out_of_memory(training, args.out_of_memory)]
    good += [exactly(f"kill-steps-{name}", value) for name, value in training.figures.items()]
    as_it_is("kill-steps-steps", training.steps)
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
