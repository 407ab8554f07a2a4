"""The ledger: every suite has a row, the rows fit in a quarter of an hour, and no suite outgrows its row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ledger
import pytest
from ledger import Cost

ANOTHER = ["-p", "xdist", "-n", "2", "--dist", "loadfile"]


def test_every_suite_has_a_row_and_every_row_a_suite() -> None:
    suites, rows = ledger.suites(), set(ledger.rows())
    assert suites - rows == set(), "give these suites a row in tests/budget.toml"
    assert rows - suites == set(), "these rows of tests/budget.toml have no suite"


def test_the_rows_fit_in_a_quarter_of_an_hour_also_on_slower_machines() -> None:
    assert sum(ledger.rows().values()) <= ledger.TOTAL_SECONDS


def test_a_suite_may_take_twice_its_row_and_not_more() -> None:
    budget = {"fits": 100.0}  # limit 205 s
    assert ledger.complaints(budget, {"fits": Cost(204, 204)}) == []
    assert len(ledger.complaints(budget, {"fits": Cost(206, 206)})) == 1


def test_busy_neighbours_and_busy_second_cores_cost_nothing() -> None:
    budget = {"fits": 100.0}
    assert ledger.complaints(budget, {"fits": Cost(wall_s=300, cpu_s=100)}) == []
    assert ledger.complaints(budget, {"fits": Cost(wall_s=100, cpu_s=200)}) == []


def test_a_suite_that_only_waits_is_seen() -> None:
    assert len(ledger.complaints({"sleeps": 10.0}, {"sleeps": Cost(wall_s=76, cpu_s=0)})) == 1


def test_seconds_of_a_slow_machine_count_less_and_of_a_fast_one_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for took_s, times in ((3 * ledger.WORK_SECONDS, 3.0), (ledger.WORK_SECONDS / 2, 1.0)):
        clock = iter((0.0, took_s))
        monkeypatch.setattr(ledger.time, "process_time", lambda clock=clock: next(clock))
        slowness = ledger.Slowness()
        assert slowness.look() == pytest.approx(times)
        assert slowness.look() == pytest.approx(times)  # it has just looked
        assert (Cost(30, 60) / slowness.look()).cpu_s == pytest.approx(60 / times)


def test_a_suite_without_a_row_is_left_to_the_test_that_asks_for_rows() -> None:
    assert ledger.complaints({}, {"new": Cost(1000, 1000)}) == []


def test_suites_are_files_and_folders(tmp_path: Path) -> None:
    for name in ("test_one.py", "native/test_two.py", "native/test_three.py", "long/test_four.py", "rig.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert ledger.suites(tmp_path) == {"test_one", "native"}


def test_a_run_fails_when_a_suite_outgrew_its_row(tmp_path: Path) -> None:
    """Another run, with a ledger in which this row is nearly nothing: its test passes, the run does not."""
    for name in ("conftest.py", "ledger.py", "lanes.py"):
        (tmp_path / name).write_text((ledger.TESTS / name).read_text())
    (tmp_path / "test_slow.py").write_text("import time\ndef test_it():\n    time.sleep(0.3)\n")
    (tmp_path / "budget.toml").write_text("[seconds]\ntest_slow = 0.01\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    code = f"import ledger, pytest, sys; ledger.FLOOR_SECONDS = 0; sys.exit(pytest.main({ANOTHER!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1 and "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "test_slow took" in ran.stdout
