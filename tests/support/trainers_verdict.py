"""What becomes of other people's loops, plainly and within a budget, and whether it is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from children import forked

from teraio.units import parse_bytes

CHILD = Path(__file__).with_name("trainers.py")


def results(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Train by these loops in one process, because it takes longer to start than to train. Return what came
    out by mode and name; raise ModuleNotFoundError where a library is not installed."""
    done = forked(CHILD, str(folder), *names)
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode and last.startswith("ModuleNotFoundError"):
        raise ModuleNotFoundError(last)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def faults(plain: dict[str, Any], within: dict[str, Any], memory: str) -> list[str]:
    """What is wrong with a run within a budget, beside the plain one."""
    counts, wrong = within["counts"], []
    if within["losses"] != plain["losses"]:
        wrong.append(f"losses {within['losses']}, plainly {plain['losses']}")
    if within["weights"] != plain["weights"]:
        wrong.append("other weights at the end")
    if counts["peak_bytes"] > parse_bytes(memory):
        wrong.append(f"a peak of {counts['peak_bytes']} bytes; memory is {memory}")
    if counts["fetches"] < 20:
        wrong.append(f"only {counts['fetches']} fetches: nothing was shown")
    return wrong
