"""A run of Ctrl-C at random moments of training steps. Training must continue with weights and optimizer
states of whole steps.

    python tests/long/interrupts.py [--count 100] [--seed 1]

The script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from interrupted import interrupted
from says import exactly


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    # A shell starts background jobs with Ctrl-C ignored. Python's handler makes Ctrl-C work in such a job,
    # too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    found = interrupted(args.count, args.seed)
    good = exactly("interrupts-interrupted", found["interrupted"], args.count)
    good &= exactly("interrupts-torn", found["torn"])
    good &= exactly("interrupts-errors", found["errors"])
    print(f"interrupts-steps {found['steps']} ({found['whole']} whole, {found['undone']} undone when ended)")
    print(f"interrupts-swallowed {found['swallowed']} (by a weak reference's end: Python's way)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
