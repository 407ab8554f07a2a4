"""Nothing grows while a training goes on, and what leaves memory is seen to have left it by the system."""

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
RESERVE = 4 * MIB  # for what is not counted, and the buffers of the store: there before the steps
GROWTH = 512 * 1024  # in memory, over all steps: 1 KiB per step
UNCOUNTED = 256 * 1024  # in a step, by anything but tensors


@cache
def trained() -> dict[str, Any]:
    """The store is where it is by default, below the run's own folder: on a disk."""
    asked = json.dumps({"steps": STEPS, "budget": BUDGET})
    command = [sys.executable, str(tree.SUPPORT / "growth_train.py"), asked]
    done = ended(command)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    for row in (*result["rows"], result["plenty"], result["left"]):
        print(row)
    print(result["did"])
    return result


def test_hundreds_of_steps_of_mixed_sizes_move_a_lot_and_leave_nothing_behind() -> None:
    result = trained()
    rows = result["rows"]
    assert result["did"]["evictions"] > 2 * STEPS, "little moved: the test shows little"
    sizes = [row["resident"] for row in rows]
    assert max(sizes) - sizes[0] <= GROWTH
    for name in ("descriptors", "threads", "files"):
        assert len({row[name] for row in rows}) == 1, name


def test_freed_bytes_go_back_to_the_system() -> None:
    """In every step the process has no more memory than the budget, and it is the budget that holds it: with
    more of it, the same programs take twice as much. The system counts other things, too, now and then."""
    result = trained()
    took = [row["peak"] - row["resident"] for row in result["rows"]]
    assert max(took) <= BUDGET - RESERVE + UNCOUNTED
    plenty = result["plenty"]
    assert plenty["peak"] - plenty["resident"] >= 2 * statistics.median(took)


def test_the_end_of_an_engine_is_the_end_of_its_threads_and_files() -> None:
    result = trained()
    left, before = result["left"], result["rows"][-1]
    # Python's, OpenMP's, the observer's, and sometimes that of a progress bar of torch's.
    assert left["threads"] <= 4
    assert left["files"] == 0
    assert left["descriptors"] < before["descriptors"]
