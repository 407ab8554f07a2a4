"""Limits of CPU time that mean the same on a slow or busy machine.

A loaded machine takes several times the CPU seconds of an idle one for the same work: its cores share
caches, memory and clock.  A fixed piece of work, timed before and after, tells by how much.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

IDLE_SECONDS = 0.05  # of the fixed piece of work, on an idle machine with two cores


def _fixed_work() -> float:
    """Do what planners do: heaps, dictionaries and short arrays.  Return its CPU seconds."""
    began = time.process_time()
    heap, seen, line = list[tuple[int, str]](), dict[str, int](), np.zeros(1_000)
    for i in range(20_000):
        name = f"t{i * 7_919 % 9_973}"
        heapq.heappush(heap, (i * 31 % 1_009, name))
        seen[name] = seen.get(name, 0) + i
        if i % 8 == 0:
            line[i % 1_000 :] += 1.0
            heapq.heappop(heap)
    assert len(seen) == 9_973 and line.max() > 0
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
