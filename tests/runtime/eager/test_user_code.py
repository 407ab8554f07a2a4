"""User code meets weights that are away: it never notices, and never gets other numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import tree
from children import forked, one_by_one

CHILD = tree.SUPPORT / "guard_train.py"

TOUCHES = (
    "plain",
    "prints",
    "clips",
    "mixes in",
    "writes data",
    "keeps views",
    "writes by pointer",
    "saves",
    "copies",
    "exchanges",
    "lends addresses",
    "gives views",
    "hooks first",
    "forks",
    "breaks",
    "lends",
    "blocks",
    "eager blocks",
    "frozen, written",
    "frozen, by pointer",
)
LONG = ("evaluates", "averages", "replaces", "writes in place")  # tests/long/cases.py
FEW_WRITES = ("streamed", "frozen", "frozen, touched")


def run(scenarios: Sequence[Any]) -> tuple[list[dict[str, Any]], str]:
    """The results of those that came to their end, and what the process said if it ended badly."""
    done = forked(CHILD, json.dumps(scenarios))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return found, done.stderr[-3000:] if done.returncode else ""


@cache
def results(scenarios: tuple[str, ...] = (*TOUCHES, *FEW_WRITES)) -> dict[str, Any]:
    found, failed = run(scenarios)
    assert not failed, failed
    return {result["scenario"]: result for result in found}


def result_of(scenario: str) -> dict[str, Any]:
    result: dict[str, Any] = (results(LONG) if scenario in LONG else results())[scenario]
    return result


SCENARIOS = [
    *TOUCHES,
    *FEW_WRITES,
    *(pytest.param(scenario, marks=pytest.mark.long) for scenario in LONG),
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_user_code_gets_the_same_numbers_whatever_it_touches(scenario: str) -> None:
    result = result_of(scenario)
    assert result["same"]
    assert result["away"] > 4, "no weight was away while user code ran: the test shows nothing"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_being_watched_costs_no_compile_and_leaves_no_trace(scenario: str) -> None:
    plain, found = result_of(scenario)["compiles"]
    assert found == plain
    assert result_of(scenario)["plain types"]


def test_what_is_away_comes_back_when_it_is_touched_and_only_then() -> None:
    """How many are away is the plan's choice: the numbers are those of plans that do not go by the clock."""
    assert results()["prints"]["counts"]["touches"] > 10
    clips = results()["clips"]["counts"]  # gradients: when they are touched, or before, as the last step did
    assert clips["touches"] > 0 and clips["ahead"] > 0 and clips["touches"] + clips["ahead"] > 20
    eager = results()["eager blocks"]["counts"]  # what autograd saved, too
    assert eager["touches"] + eager["ahead"] > 15
    for untouched in ("plain", "blocks"):
        assert results()[untouched]["counts"]["touches"] == 0


def test_what_was_read_or_is_held_leaves_for_what_is_read_next() -> None:
    """All weights in turn, which do not fit together: in a loop, and through views that are kept."""
    for scenario in ("prints", "keeps views", "frozen, touched", "frozen, written"):
        assert results()[scenario]["counts"]["overrun_bytes"] == 0, scenario


def test_what_user_code_makes_beyond_the_budget_is_said() -> None:
    """A file in memory, and copies of the model."""
    for scenario in ("saves", "copies"):
        assert results()[scenario]["counts"]["overrun_bytes"] > 0, scenario


def test_weights_that_do_not_change_are_written_once() -> None:
    """Inference, and frozen weights, looked at or not: written is what was trained, and activations."""
    weight_bytes = 256 * 512 * 4  # all have this size, and the frozen model trains one
    assert results()["streamed"]["written"][2:] == [0] * 5
    for scenario in ("frozen", "frozen, touched"):
        assert max(results()[scenario]["written"][2:]) < 2 * weight_bytes
    for scenario in FEW_WRITES:
        assert results()[scenario]["counts"]["drops"] > 40


PLANTED = (
    ("no write is noted", "keeps views"),
    ("no write is noted", "frozen, written"),
    ("no write is noted", "frozen, by pointer"),
    ("addresses are forgotten", "lends addresses"),
    ("nothing is fetched", "mixes in"),
    ("nothing is fetched", "prints"),
)


@cache
def planted_results() -> list[Any]:
    """With each of the bugs, and then without any."""
    pairs = [*((scenario, bug) for bug, scenario in PLANTED), ("prints", "")]
    return one_by_one(pairs, lambda left: run(left)[0])


@pytest.mark.parametrize(("bug", "scenario"), PLANTED)
def test_these_tests_find_a_planted_bug(bug: str, scenario: str) -> None:
    *found, afterwards = planted_results()
    result = found[PLANTED.index((bug, scenario))]
    assert result is None or (result["bug"] == bug and not result["same"])
    assert afterwards["same"], "what a bug has left behind would be found, too"
