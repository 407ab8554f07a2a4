"""Tests of tests/long/branches.py, which merges the branch counts of the parts of a run."""

from __future__ import annotations

import sys
from typing import Any

import tree

sys.path.insert(0, str(tree.ROOT / "tests" / "long"))

import branches

HERE = "runtime/device/clock.py"


def report(missing: list[list[int]], sha256: str | None = None, path: str = HERE) -> dict[str, Any]:
    summary = {"num_branches": 10, "covered_branches": 10 - len(missing)}
    known = sha256 or branches.sha256_of(path)
    return {"files": {path: {"summary": summary, "missing_branches": missing, "sha256": known}}}


def test_a_branch_is_missing_if_no_part_has_taken_it() -> None:
    merged = report([[1, 2], [3, -1], [5, 6]])
    branches.add(merged, report([[3, -1], [7, 8]]))
    (file,) = branches.files_of(merged)
    assert (file.name, file.missing, file.taken, file.percent) == (HERE, ((3, -1),), 9, 90.0)


def test_report_of_a_changed_file_is_ignored() -> None:
    merged = report([[1, 2]])
    branches.add(merged, report([], sha256="of another"))
    branches.add(merged, report([], sha256="of another", path="runtime/step/tracker.py"))
    assert [file.taken for file in branches.files_of(merged)] == [9]


def test_file_seen_only_by_an_earlier_part_counts() -> None:
    merged = report([[1, 2]])
    branches.add(merged, report([[1, 2], [3, 4]], path="runtime/step/tracker.py"))
    assert [(file.name, file.taken) for file in branches.files_of(merged)] == [
        ("runtime/step/tracker.py", 8),
        (HERE, 9),
    ]


def test_counted_files_exist() -> None:
    files = [str(path) for path in tree.package().values()]
    for beginning in branches.ENGINE_AND_READERS:
        assert any(file.startswith(beginning) for file in files), beginning
    assert {*branches.ON_A_GPU} <= {*filter(branches.counted, files)}
    assert not any(branches.counted(file) for file in files if file.startswith(("passes/", "teraio/cli/")))
