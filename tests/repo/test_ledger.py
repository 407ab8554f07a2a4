"""Tests of the ledger of test costs. Each suite has a row, and the sum of the rows has a limit.

A row is the number of seconds that its suite took when the rows were measured. A suite may take about twice
its row.
"""

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


def test_rows_sum_to_at_most_the_total_limit() -> None:
    assert sum(ledger.rows().values()) <= ledger.TOTAL_SECONDS


# Suites that always take exactly the seconds of their rows.
AS_EVER = {f"as ever {n}": 100.0 for n in range(ledger.ENOUGH)}


def complaints(row: float, cost: Cost, pace: float = 1.0) -> list[str]:
    """Return the complaints about a suite that took `cost`. Each other suite takes `pace` times the seconds
    of its row."""
    others = {suite: Cost(seconds * pace, seconds * pace) for suite, seconds in AS_EVER.items()}
    return ledger.complaints({**AS_EVER, "it": row}, {**others, "it": cost})


def test_a_suite_may_take_twice_its_row_and_not_more() -> None:
    assert complaints(100.0, Cost(204, 204)) == []  # the limit for a row of 100 s is 205 s
    assert len(complaints(100.0, Cost(206, 206))) == 1


def test_excess_in_only_one_of_wall_and_cpu_time_is_no_complaint() -> None:
    assert complaints(100.0, Cost(wall_s=300, cpu_s=100)) == []
    assert complaints(100.0, Cost(wall_s=100, cpu_s=250)) == []


def test_suite_that_only_waits_is_reported() -> None:
    assert len(complaints(10.0, Cost(wall_s=76, cpu_s=0))) == 1


def test_limit_on_a_slow_machine_follows_the_other_suites() -> None:
    assert complaints(100.0, Cost(609, 609), pace=3.0) == []  # the limit is three times 205 s
    assert len(complaints(100.0, Cost(620, 620), pace=3.0)) == 1
    assert len(complaints(100.0, Cost(206, 206), pace=0.3)) == 1  # a fast machine does not lower the limit


def test_all_suites_beyond_their_rows_are_reported() -> None:
    assert len(ledger.complaints(AS_EVER, {suite: Cost(1300, 1300) for suite in AS_EVER})) == ledger.ENOUGH


def test_pace_needs_enough_suites() -> None:
    few = dict(list(AS_EVER.items())[1:])
    assert ledger.pace(few, {suite: Cost(100, 100) for suite in few}) == ledger.PACES[1]
    assert ledger.pace(AS_EVER, {suite: Cost(100, 100) for suite in AS_EVER}) == ledger.PACES[0]


def test_suite_without_a_row_gets_no_complaint() -> None:
    assert ledger.complaints({}, {"new": Cost(1000, 1000)}) == []


def test_suites_are_files_and_folders(tmp_path: Path) -> None:
    for name in ("test_one.py", "native/test_two.py", "native/test_three.py", "long/test_four.py", "rig.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert ledger.suites(tmp_path) == {"test_one", "native"}


def test_a_run_fails_when_a_suite_outgrew_its_row(tmp_path: Path) -> None:
    """Run pytest with a ledger whose only row is 0.01 s. The test passes, but the run fails."""
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
    """Check the sum of the rows that belong to fast suites.

    Two suites run in parallel, and half of the minute is for imports.
    """
    fast = [seconds for seconds in ledger.rows().values() if seconds <= 2.0]
    assert len(fast) >= 40 and sum(fast) / 2 <= 30
