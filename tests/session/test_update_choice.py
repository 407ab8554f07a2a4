"""Tests of `updates="auto"`: when a run tries late updates, which kind of step it keeps, and what later runs
do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tree
from children import forked_rows

Results = dict[str, dict[str, Any]]

CASES = [
    "never planned",
    "always settled",
    "faster twice",
    "slower twice",
    "another budget",
    "plan file",
    "plan file in the backward",
]


@pytest.fixture(scope="module")
def results() -> Results:
    rows = forked_rows(tree.SUPPORT / "update_choice_cases.py", json.dumps(CASES))
    return {row["case"]: row for row in rows}


def stages_of(row: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["stages"]))


@pytest.mark.parametrize("case", CASES)
def test_numbers_equal_plain_training(results: Results, case: str) -> None:
    assert results[case]["same"]
    assert results[case].get("first", {"same": True})["same"]


def test_late_updates_are_kept_if_steps_are_faster(results: Results) -> None:
    row = results["faster twice"]["first"]
    assert stages_of(row) == ["waiting", "before", "changing", "after", "decided"]
    assert row["late"][-1] == max(row["late"]) == 2
    assert row["late_updates"] == row["owed_updates"] - 1 and not row["settled_updates"]
    assert any("late updates are kept" in line for line in row["lines"])


def test_the_plan_with_late_updates_needs_no_further_measurement(results: Results) -> None:
    row = results["faster twice"]["first"]
    # Two steps move tensors on demand. The next step begins with other tensors than the plan's steps.
    after = row["misses"][row["stages"].index("changing") :]
    assert after[5:] == [0] * len(after[5:])


def test_updates_run_at_the_step_again_if_steps_are_slower(results: Results) -> None:
    row = results["slower twice"]["first"]
    assert stages_of(row) == ["waiting", "before", "changing", "after", "decided"]
    assert max(row["late"]) == 2 and row["late"][-1] == 0
    assert any("run at step() again" in line for line in row["lines"])
    assert row["misses"][-4:] == [0] * 4  # the old plan is followed again


def test_a_run_is_steady_only_after_the_choice(results: Results) -> None:
    """A benchmark times steps only while `teraio.stats()["steady"]` is true."""
    for row in (results["faster twice"]["first"], results["slower twice"]["first"], results["never planned"]):
        decided = row["stages"].index("decided")
        assert row["steady"][decided:] == [True] * len(row["steady"][decided:]) != []
        assert not any(row["steady"][:decided])


def test_late_updates_are_not_tried_if_the_plan_is_no_faster(results: Results) -> None:
    row = results["never planned"]
    assert stages_of(row) == ["waiting", "decided"]
    assert max(row["late"]) == row["owed_updates"] == 0


def test_the_comparison_ends_if_no_step_has_late_updates(results: Results) -> None:
    row = results["always settled"]
    assert stages_of(row) == ["waiting", "before", "changing", "decided"]
    assert row["late"][-1] == 0


def test_a_later_run_begins_with_the_faster_kind(results: Results) -> None:
    row = results["faster twice"]
    assert row["first"]["stages"][-1] == "decided"
    assert stages_of(row) == ["waiting", "decided"]
    assert row["late"][:2] == [0, 2]
    assert row["misses"][6:] == [0] * len(row["misses"][6:])
    row = results["slower twice"]
    assert stages_of(row) == ["waiting", "decided"] and max(row["late"]) == 0


def test_another_budget_makes_the_choice_again(results: Results) -> None:
    stages = results["another budget"]["stages"]
    again = stages[stages.index("decided") :]
    assert list(dict.fromkeys(again)) == ["decided", "waiting", "before", "changing", "after"]
    assert again[-1] == "decided"


def test_a_run_follows_a_plan_file_with_late_updates(results: Results) -> None:
    row = results["plan file"]
    assert row["differs"] and row["of_file"] == max(row["late"]) == 4
    assert any(line.startswith("replaying") for line in row["lines"])
    assert row["late_updates"] >= row["owed_updates"] - 4 and not row["settled_updates"]
    assert row["misses"][6:] == [0] * len(row["misses"][6:])


def test_step_refuses_a_plan_file_with_late_updates(results: Results) -> None:
    assert (
        "plan with late updates (4 weights), and the option 'updates' is 'step'"
        in (results["plan file"]["refused"])
    )


def test_a_run_follows_a_plan_file_with_updates_in_the_backward(results: Results) -> None:
    row = results["plan file in the backward"]
    assert row["same"] and row["of_file"] == 6 and row["late_of_file"] == 0
    assert any("the updates of 6 weights run in the backward, as in" in line for line in row["lines"])
    assert row["misses"][4:] == [0] * 25  # the moves of the file fit the step that the run composes
    assert row["backward_updates"] == 81


def test_other_options_refuse_a_plan_file_with_updates_in_the_backward(results: Results) -> None:
    assert "need the option updates='backward'" in results["plan file in the backward"]["refused"]
