"""Transfers overlap with compute: with a slow store, a planned step takes little more time than compute
alone."""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

import pytest
import tree
from children import ended

pytestmark = pytest.mark.alone

BENCHMARK = tree.ROOT / "benchmarks" / "engine" / "overlap.py"
SIZE = {"layers": 12, "width": 64, "batch": 8192, "pace-ms": 6, "rounds": 3}
ATTEMPTS = 4  # number of attempts, because other processes may disturb a single attempt


@cache
def measured() -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARK), "--attempts", str(ATTEMPTS)]
    for name, value in SIZE.items():
        command += [f"--{name}", str(value)]
    done = ended(command)
    assert done.stdout, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout)
    print(done.stdout)
    return result


def test_a_planned_step_takes_little_longer_than_compute_alone() -> None:
    assert measured()["planned_per_compute"] <= 1.15


def test_waits_for_same_moves_lengthen_step() -> None:
    assert measured()["forced_per_compute"] >= 1.6


def test_compared_runs_have_same_transfers() -> None:
    result = measured()
    assert 0.65 <= result["transfer_per_compute"] <= 1.0
    for way in ("written_bytes", "read_bytes"):
        assert result["planned"][way] == result["forced"][way] >= 4 * 2**20
    for run in (result["planned"], result["forced"]):
        assert run["misses"] == run["skipped_moves"] == 0
