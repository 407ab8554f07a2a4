"""A memory limit set by the operating system: plain training fails, and training with teraio finishes with
the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys

import tree
from children import ended

CHILD = tree.SUPPORT / "limited_child.py"
SAVED_BYTES = 20 * (16 << 20)  # plain training saves at least this many bytes for its backward
# The distance of the memory limit from the bytes in use before the training. The distance has room for the
# budget of 112 MiB, for the stacks of eight threads (8 MiB each), and for allocations of eager code.
EXTRA_BYTES = 240 << 20


def train(kind: str, extra_bytes: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHILD), kind, str(extra_bytes)]
    return ended(command)


def test_training_finishes_under_limit_that_stops_plain_training() -> None:
    assert EXTRA_BYTES < SAVED_BYTES
    free, refused, ours = train("plain", 0), train("plain", EXTRA_BYTES), train("teraio", EXTRA_BYTES)
    assert free.returncode == 0, free.stderr[-3000:]
    assert refused.returncode != 0
    text = refused.stderr[-3000:]
    assert "can't allocate memory" in text or "MemoryError" in text, text
    assert ours.returncode == 0, ours.stderr[-3000:]
    expected, got = json.loads(free.stdout), json.loads(ours.stdout)
    print(got)
    assert got["losses"] == expected["losses"]
    assert len(set(got["losses"])) == len(got["losses"]) == 3
    assert got["digest"] == expected["digest"]
    assert got["stats"]["evictions"] >= 20
    assert got["stats"]["planned_moves"] >= 20, "the last step has a plan"
