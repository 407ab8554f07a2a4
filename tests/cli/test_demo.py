"""Tests of `teraio demo`, a command that the README shows. The tests use a small model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import tree
from children import ended

from teraio import progress
from teraio.cli import demo as demo_command
from teraio.cli import main

TINY = ("--inner", "eager", "--layers", "2", "--batch", "2", "--length", "96", "--steps", "1")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "teraio", "demo", *TINY, *arguments]
    return ended(command, cwd=tree.ROOT)


def test_the_demo_shows_equal_losses_within_a_part_of_the_memory() -> None:
    done = demo("--part", "0.55")
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^  (\S.*?)  +(.*)$", done.stdout, re.MULTILINE))
    assert rows["losses equal, bit for bit"] == "yes"
    allowed = mebibytes(rows["memory allowed"])
    plain, ours = (mebibytes(text) for text in re.findall(r"[\d.]+ MiB", rows["peak memory of tensors"]))
    assert ours <= allowed < 0.56 * plain
    assert all(mebibytes(text) > 5 for text in rows["written to / read from disk"].split(" / "))
    picture = done.stdout.split("bit for bit")[1]
    assert ":" in picture and "#" in picture
    assert len(re.findall(r"^ +[\d.]+ MiB \|", picture, re.MULTILINE)) == 12


def mebibytes(text: str) -> float:
    return float(re.findall(r"([\d.]+) MiB", text)[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--steps", "0"), "whole number from 1 on"),
        (("--layers", "-1"), "whole number from 1 on"),
        (("--part", "0"), "no part of the plain peak"),
        (("--part", "nan"), "no part of the plain peak"),
        (("--part", "third"), "no part of the plain peak"),
    ],
)
def test_invalid_numbers_are_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main.main(["demo", *arguments])
    assert refused.value.code == 2
    assert words in capsys.readouterr().err


def test_different_losses_are_reported_and_set_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = iter([run_of([2.0, 1.5]), run_of([2.0, 1.25])])
    monkeypatch.setattr("teraio.cli.demo._train_in_child", lambda args, budget: next(runs))
    assert main.main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


def run_of(losses: list[float]) -> dict[str, object]:
    return {"losses": losses, "tensor_peak_bytes": 2**20, "step_s": 1.0}


@pytest.mark.parametrize("budget", [400, 399, 401, 350, 1200, 1])
def test_the_picture_has_one_line_for_the_budget(budget: int) -> None:
    """Check that exactly one row of the picture has the line for the budget.

    The picture has twelve rows of 100 bytes each. A budget of 400 bytes lies exactly between two rows.
    """
    picture = demo_command._memory_picture([1200], [0], budget)
    rows = [row.partition("|")[2] for row in picture.splitlines() if "|" in row]
    assert [at for at, row in enumerate(rows) if "-" in row] == [12 - -(-budget * 12 // 1200)]


def test_budget_above_the_peak_is_not_in_the_picture() -> None:
    assert "|-" not in demo_command._memory_picture([1200], [0], 1201)


def test_progress_shows_the_step_numbers_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    args = main._make_parser().parse_args(["demo", "--steps", "1"])
    shown: list[str] = []

    def lines() -> Iterator[str]:
        for line in ("no figures", *(json.dumps({"step": number}) for number in range(1, 9))):
            assert progress._LINE is not None
            shown.append(": ".join(stage.text() for stage in progress._LINE.stages))
            yield line
        yield json.dumps({"losses": [1.0]})

    monkeypatch.setattr(progress, "is_quiet", lambda: False)
    assert demo_command._read_child_output(lines(), args, "plainly") == {"losses": [1.0]}
    assert shown[0] == "teraio demo: plainly, step 1 of 7: compiling"
    assert [text.rpartition(": ")[2] for text in shown[2:6]] == [f"step {n} of 7" for n in range(2, 6)]
    assert shown[-1] == "teraio demo: plainly: step 8 of 8"  # there were more steps than expected
