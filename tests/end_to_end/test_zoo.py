"""Promises about model classes: whatever the class, the same bits within the budget, nothing stuck, and a
smallest budget that is close to what any engine would need. tests/long/zoo.py does this for all of them."""

from __future__ import annotations

import random

import pytest
import zoo_models
from zoo_verdict import HEAD, faults, line, results

SEED = 11
SAMPLE = [row.name for row in random.Random(SEED).sample(zoo_models.ROWS, 2)]
STEPS = 3  # the first, the one that is measured, a planned one


@pytest.mark.parametrize("name", [SAMPLE[0], pytest.param(SAMPLE[1], marks=pytest.mark.long)])
def test_a_class_trains_bit_equal_within_its_budgets_down_to_the_floor(name: str) -> None:
    (result,) = results([name], STEPS)
    print(f"{HEAD}\n{line(result)}")
    assert not faults(result), "\n".join(faults(result))


def test_there_are_forty_classes() -> None:
    assert len(zoo_models.HUGGING_FACE) >= 40
    assert len({row.name for row in zoo_models.ROWS}) == len(zoo_models.ROWS)
