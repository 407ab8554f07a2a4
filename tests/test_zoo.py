"""Promises about model classes: whatever the class, the same bits within the budget, nothing stuck, and a
smallest budget that is close to what any engine would need. tests/long/zoo.py does this for all of them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import zoo_models
from zoo_verdict import HEAD, faults, line, results

SEED = 11
SAMPLE = [row.name for row in random.Random(SEED).sample(zoo_models.ROWS, 2)]
STEPS = 3  # the first, the one that is measured, a planned one


@cache
def trained() -> dict[str, dict[str, Any]]:
    """Two children at a time: each computes on one thread."""
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(lambda names: list(results(names, STEPS)), (SAMPLE[::2], SAMPLE[1::2]))
    return {result["name"]: result for half in halves for result in half}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_trains_bit_equal_within_its_budgets_down_to_the_floor(name: str) -> None:
    result = trained()[name]
    print(f"{HEAD}\n{line(result)}")
    assert not faults(result), "\n".join(faults(result))


def test_there_are_forty_classes() -> None:
    assert len(zoo_models.HUGGING_FACE) >= 40
    assert len({row.name for row in zoo_models.ROWS}) == len(zoo_models.ROWS)
