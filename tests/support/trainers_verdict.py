"""The results of other libraries' loops, and a comparison of plain runs with runs within a budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from children import forked

from teraio.units import parse_bytes

CHILD = Path(__file__).with_name("trainers.py")


def results(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Train with these loops in one child process, because starting a process takes longer than training.

    Return the results by mode and name. Raise ModuleNotFoundError if a library is missing.
    """
    done = forked(CHILD, str(folder), *names)
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode and last.startswith("ModuleNotFoundError"):
        raise ModuleNotFoundError(last)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def faults(plain: dict[str, Any], within: dict[str, Any], memory: str) -> list[str]:
    """Return the faults of a run within a budget, compared with the plain run of the same loop."""
    counts, wrong = within["counts"], []
    if within["losses"] != plain["losses"]:
        wrong.append(f"losses {within['losses']}, plainly {plain['losses']}")
    if within["weights"] != plain["weights"]:
        wrong.append("other weights at the end")
    if counts["peak_bytes"] > parse_bytes(memory):
        wrong.append(f"a peak of {counts['peak_bytes']} bytes; memory is {memory}")
    if counts["fetches"] < 20:
        wrong.append(f"only {counts['fetches']} fetches, so the run proves nothing")
    return wrong
