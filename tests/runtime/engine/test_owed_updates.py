"""Tests of late updates in a training: where they run, which code sees their results, and what happens after
an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tree
from children import forked_rows

Results = dict[str, dict[str, Any]]

CASES = [
    "plain loop",
    "reads one weight",
    "reads all weights",
    "fits",
    "fork",
    "failing code",
    "failing drive",
    "evicted while owed",
    "loads weights",
    "evaluates",
    "read by a thread",
]


@pytest.fixture(scope="module")
def results() -> Results:
    rows = forked_rows(tree.SUPPORT / "late_cases.py", json.dumps(CASES))
    return {row["case"]: row for row in rows}


@pytest.mark.parametrize("case", [case for case in CASES if case != "failing code"])
def test_numbers_equal_plain_training(results: Results, case: str) -> None:
    assert results[case]["same"], results[case]


def test_all_updates_of_a_plain_loop_run_in_the_forward(results: Results) -> None:
    row = results["plain loop"]
    assert row["owed_updates"] >= 20
    # The updates of the last step are still owed when the counts are read.
    assert row["settled_updates"] == 0 and row["late_updates"] >= row["owed_updates"] * 6 / 7
    assert row["step_misses"] == 0 and row["overrun_bytes"] == 0
    assert len(set(row["slots"][3:])) == 1  # each update has one slot, in the forward or at `step()`


def test_a_look_settles_only_the_update_of_its_tensor(results: Results) -> None:
    row = results["reads one weight"]
    assert 0 < row["settled_updates"] <= 5
    assert row["late_updates"] > 2 * row["settled_updates"]


def test_another_thread_sees_a_weight_only_after_its_update(results: Results) -> None:
    assert results["read by a thread"]["seen"] == [True] * 3


def test_updates_that_are_always_settled_run_at_the_step_again(results: Results) -> None:
    row = results["reads all weights"]
    assert row["unfit"] == row["owed_updates"] / 4
    assert row["late_updates"] == 0


def test_updates_run_at_the_step_if_nothing_is_evicted(results: Results) -> None:
    assert results["fits"]["owed_updates"] == 0


def test_a_fork_settles_all_updates(results: Results) -> None:
    row = results["fork"]
    assert row["owed"] and row["settled_updates"] == row["owed"][0] > 0


def test_a_failure_in_a_late_update_names_its_step(results: Results) -> None:
    error = results["failing code"]["error"]
    assert error.startswith("TornStepError: AdamW.step layers.") and "an update of step 3" in error
    assert "planted" in error and "Call teraio.reset()" in error


def test_an_update_that_cannot_begin_is_still_owed(results: Results) -> None:
    row = results["failing drive"]
    assert row["failed"] and all("StoreReadError" in text for _, text in row["failed"])
    assert all(0 < left <= row["owed"] for left, _ in row["failed"])


def test_withheld_bytes_can_be_evicted(results: Results) -> None:
    assert {"grad", "weight"} <= {*results["evicted while owed"]["withheld"]}


def test_each_evaluation_is_a_step_of_its_own(results: Results) -> None:
    row = results["evaluates"]
    assert row["lengths"] == [1, 1, 1, 1]
    assert row["settled_updates"] == 0
