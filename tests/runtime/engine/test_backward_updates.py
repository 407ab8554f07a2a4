"""Tests of updates in the backward: loops that keep to their assumptions, and loops that break one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tree
from children import forked_rows

Results = dict[str, dict[str, Any]]

CASES = [
    "plain loop",
    "accumulates in each step",
    "adds in eager code",
    "steps in hooks",
    "owes in hooks",
    "evicted before the step",
    "schedules rates",
    "interrupted",
    "failing code",
    "breaks an assumption",
    "looks after the step",
    "skips the step",
]
REASONS = {
    "changes a rate": "the option 'lr' was 0.01 in the backward and is 0.5 at step()",
    "changes betas": "the option 'betas' was (0.9, 0.999) in the backward and is (0.5, 0.5) at step()",
    "replaces a gradient": "its gradient of layers.2.weight is another",
    "forgets a gradient": "its gradient of layers.2.weight is another",
    "replaces data": "layers.2.weight has other bytes",
    "replaces a state": "state 'exp_avg' of layers.2.weight is another",
    "clears states": "state 'step' of layers.2.weight is another",
    "replaces groups": "the optimizer has other groups now",
    "steps with a closure": "steps all parameters together",
    "steps in autocast": "modes around step()",
    "steps by another optimizer": "another optimizer steps its weights",
}


@pytest.fixture(scope="module")
def results() -> Results:
    return {row["case"]: row for row in forked_rows(tree.SUPPORT / "backward_cases.py", json.dumps(CASES))}


@pytest.mark.parametrize("case", ["plain loop", "evicted before the step", "schedules rates"])
def test_numbers_equal_plain_training(results: Results, case: str) -> None:
    row = results[case]
    assert row["same"] and row["backward_updates"] == 21  # three updates in each of the last seven steps
    assert row["overrun_bytes"] == 0 and row["step_misses"] == 0


def test_sums_of_gradients_are_updated_at_the_step(results: Results) -> None:
    accumulates, adds = results["accumulates in each step"], results["adds in eager code"]
    assert accumulates["same"] and accumulates["backward_updates"] == 0
    assert adds["same"] and adds["backward_updates"] == 14  # all but the weight that eager code uses


def test_withheld_bytes_can_be_evicted(results: Results) -> None:
    assert results["evicted before the step"]["withheld"] == ["state", "weight"]


def test_steps_in_hooks_run_in_the_backward(results: Results) -> None:
    row = results["steps in hooks"]
    assert row["same"] and row["backward_updates"] == 42 and row["step_misses"] == 0


def test_steps_in_hooks_are_owed(results: Results) -> None:
    row = results["owes in hooks"]
    assert row["same"] and row["settled_updates"] == 0
    assert row["late_updates"] == 36 and row["owed_updates"] == 42  # the last six are still owed


def _check_lines(row: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Check that each error names the line that breaks an assumption. Return these rows."""
    found = {name: each for name, each in row.items() if isinstance(each, dict) and each["line"]}
    for name, each in found.items():
        assert each["error"].split(": ", 1)[1].removeprefix("teraio: ").startswith(each["line"]), (name, each)
        assert "updates='late'" in each["error"]
    assert row["updates"] == 15
    return found


def test_a_look_is_an_error_that_names_its_line(results: Results) -> None:
    found = _check_lines(results["breaks an assumption"])
    looks = {name: each["error"] for name, each in found.items() if name not in REASONS}
    assert len(looks) == 14
    assert all(" needs " in error or "before step()" in error for error in looks.values())


def test_a_change_is_an_error_at_the_step(results: Results) -> None:
    found = _check_lines(results["breaks an assumption"])
    assert found.keys() >= REASONS.keys()
    assert {name: found[name] for name in REASONS if REASONS[name] not in found[name]["error"]} == {}


def test_the_training_cannot_go_on_with_other_numbers(results: Results) -> None:
    assert "BackwardUpdateError" in results["breaks an assumption"]["again"]


def test_a_look_of_another_thread_ends_the_training(results: Results) -> None:
    row = results["breaks an assumption"]["reads in a thread"]
    assert row["error"] == "" and row["torn"]


def test_a_gradient_is_freed_until_the_loop_sets_it_to_none(results: Results) -> None:
    row = results["looks after the step"]
    found = _check_lines(row)
    assert len(found) == 3 and all("has freed this gradient" in each["error"] for each in found.values())
    assert row["reset"] == ""  # no weight is wrong


def test_a_missing_step_is_an_error_in_the_next_forward(results: Results) -> None:
    assert "a program takes layers.0.weight before step()" in results["skips the step"]["error"]


def test_ctrl_c_in_the_backward_waits_for_the_step(results: Results) -> None:
    row = results["interrupted"]
    assert row["stopped"] == "step 6" and row["same"]


def test_a_failure_in_the_backward_tears_the_step(results: Results) -> None:
    error = results["failing code"]["error"]
    assert error.startswith("TornStepError: AdamW.step layers.") and "in the backward: planted" in error


def test_a_reset_before_the_step_leaves_no_gradient(results: Results) -> None:
    assert results["skips the step"]["nan"]  # it was freed, so nobody can repeat the update with it
