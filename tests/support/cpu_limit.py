"""Limits of CPU time that mean the same on a slow or busy machine.

A loaded machine takes several times the CPU seconds of an idle one for the same work: its cores share
caches, memory and clock.  A fixed piece of work, timed before and after, tells by how much.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

IDLE_SECONDS = 0.05  # of the fixed piece of work, on an idle machine with two cores


def _fixed_work() -> float:
    """Read a text of some MiB into objects: interpreted code, memory that is new.  Return its CPU seconds."""
    began = time.process_time()
    rows = [{"name": f"t{i * 7_919 % 9_973}", "size": i, "reads": [i, i + 1]} for i in range(15_000)]
    read = json.loads(json.dumps(rows))
    seen = {row["name"]: row for row in sorted(read, key=lambda row: -row["size"])}
    assert len(seen) == 9_973
    return time.process_time() - began


def slowness() -> float:
    """Return how many times longer than on an idle machine CPU work takes now; at least 1."""
    return max(1.0, min(_fixed_work() for _ in range(3)) / IDLE_SECONDS)


@contextmanager
def at_most(seconds: float, given_s: float = 0.0) -> Iterator[None]:
    """Fail when the block takes more CPU time than `seconds` of an idle machine.

    `given_s` is a time limit that the block itself keeps by the clock; no slow machine stretches it.
    """
    times = slowness()
    began = time.process_time()
    yield
    used = time.process_time() - began
    limit = given_s + seconds * max(times, slowness())
    assert used < limit, (
        f"{used:.2f} s of CPU, not {limit:.2f} s ({seconds:g} s on an idle machine, {given_s:g} s given)"
    )
