"""Tests of the figures in docs/rivals.md and docs/recipes/: they are the figures of the kept rows."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import tree

sys.path.insert(0, str(tree.ROOT / "benchmarks" / "planner"))

import rivals_published as published
import rivals_tables as tables

RESULTS = tree.ROOT / "benchmarks" / "results"
ROWS: list[dict[str, Any]] = json.loads((RESULTS / "2026-11-30-rivals.json").read_text())["rows"]
LAPTOP: dict[str, Any] = json.loads((RESULTS / "2026-11-30-laptop.json").read_text())


def test_pages_have_the_tables_of_the_kept_rows() -> None:
    made = tables.page_tables(ROWS, LAPTOP)
    pages = {page: page.read_text() for page in tables.PAGES}
    stale = [page.name for page, text in pages.items() if tables.with_tables(text, made) != text]
    assert not stale, "run: python benchmarks/planner/rivals.py --pages ROWS"
    used = [name for text in pages.values() for name in re.findall(r"<!-- table: ([\w -]+) -->", text)]
    assert sorted(used) == sorted(made)
    assert not [table for table in made.values() if table.count("\n") < 3 or "| - |" in table]


def test_page_with_a_changed_figure_is_stale() -> None:
    made = tables.page_tables(ROWS, LAPTOP)
    page = tables.with_tables("<!-- table: rtx4090 -->\n\n", made)
    assert page.count("\n") > 5
    assert tables.with_tables(page.replace("914", "915"), made) == page


def test_every_case_has_a_row_with_a_plan() -> None:
    names = ("machine", "model", "sequence", "batch", "micro_batches", "frozen", "efficiency_percent")
    known = {tuple(row[name] for name in names) for row in ROWS if row.get("step_ms")}
    cases = [*(case for each in published.PUBLISHED for case in each.cases), *published.RECIPES]
    steps = [(case.machine, case.step, case.efficiency_percent) for case in cases]
    wanted = {
        (on, step.model, step.sequence, step.batch, step.micro_batches, step.frozen, percent)
        for on, step, percent in steps
    }
    assert wanted == known
    assert all(row["bound_ms"] <= row["step_ms"] and row["compute_ms"] <= row["step_ms"] for row in ROWS)


@pytest.mark.parametrize(
    ("each", "percent"),
    [
        (each, percent)
        for each, percent in zip(
            [each for each in published.PUBLISHED if each.system == "LLMQ"], (72.4, 69.8, 54.6), strict=True
        )
    ],
    ids=lambda value: value.step.model if isinstance(value, published.Published) else None,
)
def test_part_of_the_peak_agrees_with_the_figure_of_llmq(each: published.Published, percent: float) -> None:
    """Compare with LLMQ's own figure for the same run, which it calls `sol` (speed of light)."""
    work = published.work_of(each.step.model, each.step.sequence, False)
    part = each.tokens_per_s * work.flop_per_token / published.CARDS[each.card].peak_flop_per_s
    assert abs(100 * part - percent) < 1
