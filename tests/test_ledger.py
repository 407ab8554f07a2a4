"""The ledger: every suite has a row, the rows fit in a quarter of an hour, and no suite outgrows its row."""

from __future__ import annotations

from pathlib import Path

import ledger
from ledger import Cost


def test_every_suite_has_a_row_and_every_row_a_suite() -> None:
    suites, rows = ledger.suites(), set(ledger.rows())
    assert suites - rows == set(), "give these suites a row in tests/budget.toml"
    assert rows - suites == set(), "these rows of tests/budget.toml have no suite"


def test_the_rows_fit_in_a_quarter_of_an_hour() -> None:
    assert sum(ledger.rows().values()) <= ledger.TOTAL_SECONDS


def test_a_suite_may_grow_by_half_and_not_by_more() -> None:
    budget = {"fits": 100.0}  # limit 155 s
    assert ledger.complaints(budget, {"fits": Cost(154, 154)}) == []
    assert len(ledger.complaints(budget, {"fits": Cost(156, 156)})) == 1


def test_busy_neighbours_and_busy_second_cores_cost_nothing() -> None:
    budget = {"fits": 100.0}
    assert ledger.complaints(budget, {"fits": Cost(wall_s=300, cpu_s=100)}) == []
    assert ledger.complaints(budget, {"fits": Cost(wall_s=100, cpu_s=200)}) == []


def test_a_suite_that_only_waits_is_seen() -> None:
    assert len(ledger.complaints({"sleeps": 10.0}, {"sleeps": Cost(wall_s=61, cpu_s=0)})) == 1


def test_a_suite_without_a_row_is_left_to_the_test_that_asks_for_rows() -> None:
    assert ledger.complaints({}, {"new": Cost(1000, 1000)}) == []


def test_suites_are_files_and_folders(tmp_path: Path) -> None:
    for name in ("test_one.py", "native/test_two.py", "native/test_three.py", "long/test_four.py", "rig.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert ledger.suites(tmp_path) == {"test_one", "native"}


def test_no_suite_outgrew_its_row(spent: dict[str, Cost]) -> None:
    """Runs last and looks at the suites that ran before it, be it all of them or one."""
    assert ledger.complaints(ledger.rows(), spent) == []
