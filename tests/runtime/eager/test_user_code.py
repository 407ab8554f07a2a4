"""User code that uses evicted weights. Its numbers, compiles and types equal those without teraio."""

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
# Only tests/long/cases.py runs these scenarios.
LONG = ("evaluates", "averages", "replaces", "writes in place")
FEW_WRITES = ("streamed", "frozen", "frozen, touched")


def run(scenarios: Sequence[Any]) -> tuple[list[dict[str, Any]], str]:
    """Return a pair: the results of the completed scenarios, and a text.

    If a scenario failed, the text is the stderr of the process. Otherwise the text is empty.
    """
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
    assert result["away"] > 4, "no weight was evicted while user code ran: the test shows nothing"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_observation_causes_no_compile_and_keeps_plain_types(scenario: str) -> None:
    plain, found = result_of(scenario)["compiles"]
    assert found == plain
    assert result_of(scenario)["plain types"]


def test_evicted_tensors_are_fetched_only_if_user_code_touches_them() -> None:
    """Check how many tensors the engine fetches because user code touches them.

    The plan decides how many tensors are evicted. The limits in this test hold for plans that do not depend
    on measured times.
    """
    # If user code also touched the tensor in the previous step, the engine fetches it ahead of the touch.
    exchanges = results()["exchanges"]["counts"]
    assert exchanges["touches"] > 50 and exchanges["ahead"] > 10
    # Clipping asks for norms of gradients and scales them. Only the first step fetches gradients for it.
    clips = results()["clips"]["counts"]
    assert clips["touches"] == results()["clips"]["touches of first step"] > 0 == clips["ahead"]
    assert clips["remembered_norms"] > 20 and clips["owed_scalings"] > 20
    # The counts include the tensors that eager autograd saved for its backward.
    eager = results()["eager blocks"]["counts"]
    assert eager["touches"] + eager["ahead"] > 15
    for untouched in ("plain", "blocks"):
        assert results()[untouched]["counts"]["touches"] == 0


def test_reading_all_weights_in_turn_causes_no_overrun() -> None:
    """Check that user code causes no overrun when it reads the weights one by one. All weights together do
    not fit in memory.

    User code reads the weights in a loop, or through views that it keeps.
    """
    for scenario in ("prints", "keeps views", "frozen, touched", "frozen, written"):
        assert results()[scenario]["counts"]["overrun_bytes"] == 0, scenario


def test_tensors_of_user_code_beyond_the_budget_count_as_overrun() -> None:
    """The user code of these scenarios holds a file in memory, or copies of the model."""
    for scenario in ("saves", "copies"):
        assert results()[scenario]["counts"]["overrun_bytes"] > 0, scenario


def test_weights_that_do_not_change_are_written_once() -> None:
    """Check that inference writes no bytes to the store after its first steps.

    If some weights are frozen, the engine writes only the trained weight and the activations again.
    """
    weight_bytes = 256 * 512 * 4  # bytes of each weight; the frozen model trains only one weight
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
    """Run one scenario with each planted bug, and finally a scenario without a bug."""
    pairs = [*((scenario, bug) for bug, scenario in PLANTED), ("prints", "")]
    return one_by_one(pairs, lambda left: run(left)[0])


@pytest.mark.parametrize(("bug", "scenario"), PLANTED)
def test_these_tests_find_a_planted_bug(bug: str, scenario: str) -> None:
    *found, afterwards = planted_results()
    result = found[PLANTED.index((bug, scenario))]
    assert result is None or (result["bug"] == bug and not result["same"])
    assert afterwards["same"], "a bug has left something behind"
