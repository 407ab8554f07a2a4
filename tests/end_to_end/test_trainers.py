"""Promises to people whose loop is somebody else's: it trains within the budget, with the same numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trainers
import trainers_verdict

# The others need packages of their own: tests/long/train_loops.py.
NAMES = ("trainer", "resumed", "blocks")


@cache
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    return trainers_verdict.results(folder, NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainers")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_same_within_a_budget(folder: Path, name: str) -> None:
    both = runs(folder)
    assert trainers_verdict.faults(both["plain"][name], both["teraio"][name], trainers.MEMORY) == []


def test_a_resumed_training_is_the_one_that_was_not_stopped(folder: Path) -> None:
    within = runs(folder)["teraio"]
    assert within["resumed"]["weights"] == within["trainer"]["weights"]


def test_these_tests_find_a_loop_that_learnt_something_else(folder: Path) -> None:
    both = runs(folder)
    one, other = both["plain"]["trainer"], both["teraio"]["blocks"]
    assert len(trainers_verdict.faults(one, other, "1MiB")) == 3
