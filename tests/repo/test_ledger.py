"""The ledger: every suite has a row, the rows fit in a quarter of an hour, and no suite outgrows its row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ledger
from ledger import Cost

ANOTHER = ["-p", "xdist", "-n", "2", "--dist", "loadfile"]


def test_every_suite_has_a_row_and_every_row_a_suite() -> None:
    suites, rows = ledger.suites(), set(ledger.rows())
    assert suites - rows == set(), "give these suites a row in tests/budget.toml"
    assert rows - suites == set(), "these rows of tests/budget.toml have no suite"


def test_the_rows_fit_in_a_quarter_of_an_hour_also_on_slower_machines() -> None:
    assert sum(ledger.rows().values()) <= ledger.TOTAL_SECONDS


# Suites that are as their rows say: they tell that this is a machine like the one the rows were measured on.
AS_EVER = {f"as ever {n}": 100.0 for n in range(ledger.ENOUGH)}


def complaints(row: float, cost: Cost, pace: float = 1.0) -> list[str]:
    """Of a suite beside others that all take `pace` times their rows."""
    others = {suite: Cost(seconds * pace, seconds * pace) for suite, seconds in AS_EVER.items()}
    return ledger.complaints({**AS_EVER, "it": row}, {**others, "it": cost})


def test_a_suite_may_take_twice_its_row_and_not_more() -> None:
    assert complaints(100.0, Cost(204, 204)) == []  # limit 205 s
    assert len(complaints(100.0, Cost(206, 206))) == 1


def test_busy_neighbours_and_busy_second_cores_cost_nothing() -> None:
    assert complaints(100.0, Cost(wall_s=300, cpu_s=100)) == []
    assert complaints(100.0, Cost(wall_s=100, cpu_s=250)) == []


def test_a_suite_that_only_waits_is_seen() -> None:
    assert len(complaints(10.0, Cost(wall_s=76, cpu_s=0))) == 1


def test_on_a_slow_machine_a_suite_is_held_to_what_the_others_take() -> None:
    assert complaints(100.0, Cost(609, 609), pace=3.0) == []  # limit 615 s
    assert len(complaints(100.0, Cost(620, 620), pace=3.0)) == 1
    assert len(complaints(100.0, Cost(206, 206), pace=0.3)) == 1  # a fast one earns nobody a row


def test_everything_outgrowing_its_row_is_seen() -> None:
    assert len(ledger.complaints(AS_EVER, {suite: Cost(1300, 1300) for suite in AS_EVER})) == ledger.ENOUGH


def test_a_few_suites_tell_no_pace() -> None:
    few = dict(list(AS_EVER.items())[1:])
    assert ledger.pace(few, {suite: Cost(100, 100) for suite in few}) == ledger.PACES[1]
    assert ledger.pace(AS_EVER, {suite: Cost(100, 100) for suite in AS_EVER}) == ledger.PACES[0]


def test_a_suite_without_a_row_is_left_to_the_test_that_asks_for_rows() -> None:
    assert ledger.complaints({}, {"new": Cost(1000, 1000)}) == []


def test_suites_are_files_and_folders(tmp_path: Path) -> None:
    for name in ("test_one.py", "native/test_two.py", "native/test_three.py", "long/test_four.py", "rig.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert ledger.suites(tmp_path) == {"test_one", "native"}


def test_a_run_fails_when_a_suite_outgrew_its_row(tmp_path: Path) -> None:
    """Another run, with a ledger in which this row is nearly nothing: its test passes, the run does not."""
    (tmp_path / "support").mkdir()
    for name in ("conftest.py", "support/ledger.py", "support/lanes.py"):
        (tmp_path / name).write_text((ledger.TESTS / name).read_text())
    (tmp_path / "test_slow.py").write_text("import time\ndef test_it():\n    time.sleep(0.6)\n")
    (tmp_path / "budget.toml").write_text("[seconds]\ntest_slow = 0.01\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    code = f"import ledger, pytest, sys; ledger.FLOOR_SECONDS = 0; sys.exit(pytest.main({ANOTHER!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": "support"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1 and "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "test_slow took" in ran.stdout


def test_the_fast_suites_take_a_minute_at_most() -> None:
    """Two at a time, and half of the minute is for imports."""
    fast = [seconds for seconds in ledger.rows().values() if seconds <= 2.0]
    assert len(fast) >= 40 and sum(fast) / 2 <= 30
