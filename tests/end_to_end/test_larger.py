"""A model whose weights exceed the memory limit of its process. The tests are construction, training and
inference.

The numbers are the same as in a process without a limit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tree
from children import ended
from larger_child import LAYERS, MEMORY, STEPS, WIDTH

CHILD = tree.SUPPORT / "larger_child.py"
WEIGHTS_BYTES = LAYERS * WIDTH * WIDTH * 4
# The distance of the memory limit from the bytes in use before the training. The distance has room for the
# budget of 20 MiB, and for 16 MiB of threads and Python. Dynamo takes another 32 MiB for a short time, when
# it measures its guards.
EXTRA_BYTES = 84 << 20
# The limit also counts the stacks of threads. This command reduces each stack from 8 MiB to 1 MiB.
SMALL_STACKS = ("sh", "-c", 'ulimit -s 1024; exec "$@"', "sh")

assert MEMORY < EXTRA_BYTES < WEIGHTS_BYTES


def run(kind: str, extra_bytes: int, file: Path) -> dict[str, Any]:
    command = [*SMALL_STACKS, sys.executable, str(CHILD), kind, str(extra_bytes), str(file)]
    ran = ended(command)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_model_larger_than_memory_limit_keeps_numbers(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    free, refused, ours = (
        run("plain", 0, file),
        run("plain", EXTRA_BYTES, file),
        run("teraio", EXTRA_BYTES, file),
    )
    for part in ("train", "infer"):
        expected, got = free[part], ours[part]
        assert "can't allocate memory" in refused[part]["error"] or "MemoryError" in refused[part]["error"]
        assert "error" not in got, got
        for name in set(expected) - {"stats"}:
            assert got[name] == expected[name], name
        assert got["stats"]["overrun_bytes"] == 0
        assert got["stats"]["peak_bytes"] < MEMORY
        assert got["stats"]["planned_moves"] > 0, "the last step has a plan"
    assert not refused["train"]["made"], "plain training failed too late"
    assert len(set(free["train"]["losses"])) == len(set(free["infer"]["outputs"])) == STEPS
    assert ours["infer"]["stats"]["written_bytes"] == 0, "the file is the clean copy"
