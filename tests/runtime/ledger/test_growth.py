"""A training of 500 steps, in which memory, files and threads must not grow.

The tests compare counts of the operating system. The counts show that the engine really frees evicted bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import cache
from typing import Any

import tree
from children import ended

MIB = 2**20
STEPS, BUDGET = 500, 13 * MIB // 2
RESERVE = 4 * MIB  # bytes for uncounted memory and for buffers that the store allocates early
GROWTH = 512 * 1024  # bytes by which resident memory may grow over all steps: 1 KiB per step
UNCOUNTED = 256 * 1024  # bytes that a step may take besides tensors


@cache
def trained() -> dict[str, Any]:
    """Train in another process. The store is in its default directory, which is on a disk below the run's
    folder."""
    options = json.dumps({"steps": STEPS, "budget": BUDGET})
    command = [sys.executable, str(tree.SUPPORT / "growth_train.py"), options]
    done = ended(command)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    for row in (*result["rows"], result["plenty"], result["left"]):
        print(row)
    print(result["did"])
    return result


def test_memory_files_and_threads_do_not_grow_in_hundreds_of_steps() -> None:
    result = trained()
    rows = result["rows"]
    assert result["did"]["evictions"] > 2 * STEPS, "too few evictions for this test"
    sizes = [row["resident"] for row in rows]
    assert max(sizes) - sizes[0] <= GROWTH
    for name in ("descriptors", "threads", "files"):
        assert len({row[name] for row in rows}) == 1, name


def test_freed_bytes_return_to_the_system() -> None:
    """Check that the process takes no more memory in a step than the budget allows.

    The system sometimes counts bytes besides tensors, so the limit is higher by UNCOUNTED. With a larger
    budget, the same programs take at least twice as much memory.
    """
    result = trained()
    took = [row["peak"] - row["resident"] for row in result["rows"]]
    assert max(took) <= BUDGET - RESERVE + UNCOUNTED
    plenty = result["plenty"]
    assert plenty["peak"] - plenty["resident"] >= 2 * statistics.median(took)


def test_closed_engine_has_no_threads_and_files() -> None:
    result = trained()
    left, before = result["left"], result["rows"][-1]
    # Python, OpenMP and the observer have threads. Sometimes a progress bar of torch also has a thread.
    assert left["threads"] <= 4
    assert left["files"] == 0
    assert left["descriptors"] < before["descriptors"]
