"""Random training loops with late updates, updates in the backward, owed scalings and remembered norms. All
that user code sees must equal plain training, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tree
from children import forked_rows
from late_plants import BACKWARD_PLANTS, GRADIENT_PLANTS, PLANTS

SEEDS = (7, 8, 75)
PLANTED_SEED = 5  # its loop detects each planted bug
# The loop of the first seed clips, and the loop of the second seed scales gradients after the step.
WORKING_SEEDS = (28, 24)
BACKWARD_SEEDS = (17,)


def results(
    seeds: Sequence[int], plants: Sequence[str], works: bool = False, backward: bool = False
) -> list[dict[str, Any]]:
    request = {"seeds": seeds, "plants": plants, "works": works, "backward": backward}
    return forked_rows(tree.SUPPORT / "late_run.py", json.dumps(request))


@pytest.fixture(scope="module")
def planted() -> dict[str, dict[str, Any]]:
    return {row["plant"]: row for row in results([PLANTED_SEED], ["", *PLANTS])}


@pytest.fixture(scope="module")
def working() -> list[dict[str, Any]]:
    """Return the results of loops that scale gradients and ask for their norms."""
    return results(WORKING_SEEDS, ["", *GRADIENT_PLANTS], works=True)


@pytest.fixture(scope="module")
def backward() -> list[dict[str, Any]]:
    """Return the results of loops with updates in the backward."""
    return results(BACKWARD_SEEDS, ["", *BACKWARD_PLANTS], backward=True)


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


def test_loops_that_work_on_gradients_equal_plain_training(working: list[dict[str, Any]]) -> None:
    found = [row for row in working if not row["plant"]]
    assert [row["difference"] for row in found] == [""] * len(WORKING_SEEDS)
    assert sum(row["counts"]["owed_scalings"] for row in found) > 15
    assert sum(row["counts"]["remembered_norms"] for row in found) > 4


@pytest.mark.parametrize("plant", GRADIENT_PLANTS)
def test_planted_bugs_of_gradient_calls_are_detected(working: list[dict[str, Any]], plant: str) -> None:
    assert any(row["difference"] for row in working if row["plant"] == plant)


def test_loops_with_updates_in_the_backward_equal_plain_training(backward: list[dict[str, Any]]) -> None:
    found = [row for row in backward if not row["plant"]]
    assert [row["difference"] for row in found] == [""] * len(BACKWARD_SEEDS)
    assert sum(row["counts"]["backward_updates"] for row in found) > 20
    assert not any(row["counts"]["refused_loops"] for row in found)


@pytest.mark.parametrize("plant", BACKWARD_PLANTS)
def test_planted_bugs_of_updates_in_the_backward_are_detected(
    backward: list[dict[str, Any]], plant: str
) -> None:
    assert any(row["difference"] for row in backward if row["plant"] == plant)
