"""Ctrl-C at random moments inside training steps: the model goes on, with weights and states of whole steps.

    python tests/long/interrupts.py [--count 100] [--seed 1]

Prints `name value target PASS|FAIL`; exit code 0 or 1.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from interrupted import interrupted


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    # A shell starts what is in its background with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    found = interrupted(args.count, args.seed)
    targets = {"interrupted": args.count, "torn": 0, "errors": 0}
    verdicts = {name: found[name] == target for name, target in targets.items()}
    for name, target in targets.items():
        print(f"interrupts-{name} {found[name]} {target} {'PASS' if verdicts[name] else 'FAIL'}")
    print(f"interrupts-steps {found['steps']} ({found['whole']} whole, {found['undone']} undone when ended)")
    print(f"interrupts-swallowed {found['swallowed']} (by a weak reference's end: Python's way)")
    return int(not all(verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
