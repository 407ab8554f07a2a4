"""User code meets weights that are away: it never notices, and never gets other numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from children import ended

CHILD = Path(__file__).with_name("guard_train.py")

TOUCHES = (
    "plain",
    "prints",
    "clips",
    "mixes in",
    "writes data",
    "writes in place",
    "keeps views",
    "writes by pointer",
    "saves",
    "copies",
    "evaluates",
    "averages",
    "replaces",
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
)
FEW_WRITES = ("streamed", "frozen", "frozen, touched")


def run(scenarios: tuple[str, ...], bug: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHILD), json.dumps(scenarios), bug]
    return ended(command)


@cache
def child() -> subprocess.CompletedProcess[str]:
    return run((*TOUCHES, *FEW_WRITES))


def results() -> dict[str, Any]:
    done = child()
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("scenario", (*TOUCHES, *FEW_WRITES))
def test_user_code_gets_the_same_numbers_whatever_it_touches(scenario: str) -> None:
    result = results()[scenario]
    assert result["same"]
    assert result["away"] > 4, "no weight was away while user code ran: the test shows nothing"


@pytest.mark.parametrize("scenario", (*TOUCHES, *FEW_WRITES))
def test_the_guard_costs_no_compile_and_leaves_no_trace(scenario: str) -> None:
    """But for a frame without a program that came before the first program: then no one watched yet."""
    (plain_graphs, plain_frames), (graphs, frames) = results()[scenario]["compiles"]
    assert (graphs, frames - (scenario == "lends")) == (plain_graphs, plain_frames)
    assert results()[scenario]["plain types"]


def test_what_is_away_comes_back_when_it_is_touched_and_only_then() -> None:
    """How many are away is the plan's choice: the numbers are those of plans that do not go by the clock."""
    assert results()["prints"]["counts"]["touches"] > 10
    clips = results()["clips"]["counts"]  # gradients: when they are touched, or before, as the last step did
    assert clips["touches"] > 0 and clips["ahead"] > 0 and clips["touches"] + clips["ahead"] > 20
    eager = results()["eager blocks"]["counts"]  # what autograd saved, too
    assert eager["touches"] + eager["ahead"] > 15
    for untouched in ("plain", "blocks"):
        assert results()[untouched]["counts"]["touches"] == 0


def test_what_user_code_holds_is_in_memory_and_beyond_the_budget_that_is_said() -> None:
    assert results()["keeps views"]["counts"]["overrun_bytes"] > 0
    assert results()["prints"]["counts"]["overrun_bytes"] == 0


def test_weights_that_do_not_change_are_written_once() -> None:
    """Inference, and frozen weights, looked at or not: written is what was trained, and activations."""
    weight_bytes = 256 * 512 * 4  # all have this size, and the frozen model trains one
    assert results()["streamed"]["written"][2:] == [0] * 5
    for scenario in ("frozen", "frozen, touched"):
        assert max(results()[scenario]["written"][2:]) < 2 * weight_bytes
    for scenario in FEW_WRITES:
        assert results()[scenario]["counts"]["drops"] > 40


@pytest.mark.parametrize(
    ("bug", "scenario"),
    [
        ("nothing is exposed", "keeps views"),
        ("nothing is exposed", "mixes in"),
        ("no version is looked at", "frozen, written"),
        ("weights go unguarded", "prints"),
    ],
)
def test_these_tests_find_a_planted_bug(bug: str, scenario: str) -> None:
    done = run((scenario,), bug)
    assert done.returncode != 0 or not json.loads(done.stdout.strip().splitlines()[-1])[scenario]["same"]
