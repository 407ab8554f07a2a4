"""Limits of CPU time that are equally strict on a slow or busy machine.

For the same work, a busy machine takes several times the CPU seconds of an idle machine, because its cores
share caches, memory and clock. The module multiplies each limit by this factor. To measure the factor, it
times a fixed piece of work before and after the measured block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

IDLE_SECONDS = 0.05  # CPU seconds of the fixed work on an idle machine with two cores


def _fixed_work() -> float:
    """Write and parse a JSON text. This work runs interpreted code and uses fresh memory. Return its CPU
    seconds.
    """
    began = time.process_time()
    rows = [{"name": f"t{i * 7_919 % 9_973}", "size": i, "reads": [i, i + 1]} for i in range(15_000)]
    read = json.loads(json.dumps(rows))
    seen = {row["name"]: row for row in sorted(read, key=lambda row: -row["size"])}
    assert len(seen) == 9_973
    return time.process_time() - began


def slowness() -> float:
    """Return the factor by which the machine's CPU work is slower than on an idle machine. The least factor
    is 1.
    """
    return max(1.0, min(_fixed_work() for _ in range(3)) / IDLE_SECONDS)


@contextmanager
def at_most(seconds: float, given_s: float = 0.0) -> Iterator[None]:
    """Fail if the block takes more CPU time than `seconds`, multiplied by the machine's slowness.

    `given_s` is added to the limit without this factor. It is for a block that ends itself after so many
    seconds of wall-clock time, which a slow machine does not extend.
    """
    times = slowness()
    began = time.process_time()
    yield
    used = time.process_time() - began
    limit = given_s + seconds * max(times, slowness())
    assert used < limit, (
        f"{used:.2f} s of CPU, not {limit:.2f} s ({seconds:g} s on an idle machine, {given_s:g} s given)"
    )
