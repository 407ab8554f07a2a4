"""Model classes from libraries. Each class trains bit-equal within the budget, and all its weights can be
evicted.

For each class, the smallest working budget is close to a lower bound that holds for any engine. This file
tests two classes, and tests/long/zoo.py tests all classes.
"""

from __future__ import annotations

import random

import pytest
import zoo_models
from zoo_verdict import HEAD, faults, line, results

SEED = 11
SAMPLE = [row.name for row in random.Random(SEED).sample(zoo_models.ROWS, 2)]
STEPS = 3  # a first step, a measured step and a planned step


@pytest.mark.parametrize("name", [SAMPLE[0], pytest.param(SAMPLE[1], marks=pytest.mark.long)])
def test_model_class_trains_bit_equal_at_each_budget(name: str) -> None:
    (result,) = results([name], STEPS)
    print(f"{HEAD}\n{line(result)}")
    assert not faults(result), "\n".join(faults(result))


def test_zoo_has_forty_classes() -> None:
    assert len(zoo_models.HUGGING_FACE) >= 40
    assert len({row.name for row in zoo_models.ROWS}) == len(zoo_models.ROWS)
