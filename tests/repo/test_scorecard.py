"""Tests of the scorecard that tests/long/run.py writes: a failure must never look like a pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tree

sys.path.insert(0, str(tree.ROOT / "tests" / "long"))

from scorecard import NO_FIGURE, Figure, Scorecard, table, told

GOOD = Figure("steps", "steps-growth", "0", "<=1", "PASS")
BAD = Figure("churn", "churn-bytes", "7", "0", "FAIL")


def test_figures_are_read_from_lines_of_output() -> None:
    output = "on the way\nsteps-growth 0 <=1 PASS\nsteps-growth 0 <=1 MAYBE\n  steps-growth 0 <=1 PASS\n"
    assert told("steps", output, 0) == [GOOD]
    assert told("churn", "churn-bytes 7 0 FAIL\n", 1) == [BAD]


@pytest.mark.parametrize(
    "output, exit_code",
    [("nothing to say\n", 0), ("", 1), ("steps-growth 0 <=1 PASS\n", 1), ("steps-growth 0 <=1 PASS\n", -9)],
)
def test_script_without_figures_or_with_a_bad_exit_code_has_failed(output: str, exit_code: int) -> None:
    assert told("steps", output, exit_code)[-1] == Figure("steps", NO_FIGURE, str(exit_code), "0", "FAIL")


def test_scorecard_keeps_the_figures_of_other_proofs(tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    Scorecard(path, False).add("churn", [BAD], 1.0)
    card = Scorecard(path, False)
    card.add("steps", [GOOD], 2.4)
    assert Scorecard(path, None).figures(("steps", "zoo", "churn")) == [GOOD, BAD]
    assert json.loads(path.read_text())["found"]["steps"]["seconds"] == 2
    again = Scorecard(path, False)
    again.add("churn", [GOOD], 1.0)
    assert Scorecard(path, None).figures(("churn",)) == [GOOD]


def test_samples_and_whole_runs_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    Scorecard(path, True).add("steps", [GOOD], 1.0)
    with pytest.raises(SystemExit, match=r"score\.json has samples: name another file"):
        Scorecard(path, False)


@pytest.mark.parametrize(
    "text, message", [("{", "no JSON"), ("[]", "no scorecard"), ('{"figures": []}', "no scorecard")]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "score.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        Scorecard(path, True)


def test_a_table_shows_each_figure_and_a_promise_once() -> None:
    any_ = Figure("steps", "steps-peak", "12", "any", "PASS")
    shown = table([GOOD, any_, BAD], {"steps": "nothing grows", "churn": "nor here"}).splitlines()
    assert shown[2:] == [
        "| nothing grows | `steps` | growth | 0 | <=1 | PASS |",
        "|  |  | peak | 12 | any |  |",
        "| nor here | `churn` | bytes | 7 | 0 | FAIL |",
    ]


def test_table_command_returns_1_if_a_figure_failed(tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    card = Scorecard(path, False)
    card.add("steps", [GOOD], 1.0)

    def shown() -> tuple[int, str]:
        command = [sys.executable, str(tree.ROOT / "tests/long/run.py"), "--table", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert shown()[0] == 0 and "| `steps` | growth | 0 | <=1 | PASS |" in shown()[1]
    card.add("churn", [BAD], 1.0)
    assert shown()[0] == 1 and "| `churn` | bytes | 7 | 0 | FAIL |" in shown()[1]
