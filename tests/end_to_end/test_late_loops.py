"""Random training loops with late updates. All that user code sees must equal plain training, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tree
from children import forked_rows
from late_plants import PLANTS

SEEDS = (7, 8, 75)
PLANTED_SEED = 5  # its loop detects each planted bug


def results(seeds: Sequence[int], plants: Sequence[str]) -> list[dict[str, Any]]:
    request = {"seeds": seeds, "plants": plants}
    return forked_rows(tree.SUPPORT / "late_run.py", json.dumps(request))


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Any]]:
    return {row["plant"]: row for row in results([PLANTED_SEED], ["", *PLANTS])}


def test_random_loops_equal_plain_training() -> None:
    rows = results(SEEDS, [""])
    assert [row["difference"] for row in rows] == [""] * len(SEEDS)
    assert sum(row["counts"]["late_updates"] for row in rows) > 30
    assert sum(row["counts"]["settled_updates"] for row in rows) > 15


def test_the_loop_with_plants_equals_plain_training_without_them(planted: dict[str, dict[str, Any]]) -> None:
    assert planted[""]["difference"] == ""


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_detected(planted: dict[str, dict[str, Any]], plant: str) -> None:
    assert planted[plant]["difference"]
