"""Training loops of other libraries. Each loop trains within the budget and computes the same numbers as
without teraio."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trainers
import trainers_verdict

# tests/long/train_loops.py runs the other loops, which need additional packages.
NAMES = ("trainer", "resumed", "blocks")


@cache
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    return trainers_verdict.results(folder, NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.mark.parametrize("name", NAMES)
def test_training_loop_within_budget_keeps_results(folder: Path, name: str) -> None:
    both = runs(folder)
    assert trainers_verdict.faults(both["plain"][name], both["teraio"][name], trainers.MEMORY) == []


def test_resumed_training_equals_uninterrupted_training(folder: Path) -> None:
    within = runs(folder)["teraio"]
    assert within["resumed"]["weights"] == within["trainer"]["weights"]


def test_verdict_finds_different_results(folder: Path) -> None:
    both = runs(folder)
    one, other = both["plain"]["trainer"], both["teraio"]["blocks"]
    assert len(trainers_verdict.faults(one, other, "1MiB")) == 3
