"""Checks of whole trainings from which one wait was removed (by a function in plants.py).

The numbers must then differ from the numbers of a run without a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import plants
from small_llama import Training, plain

# If streams are late by less, only few of the missing waits change a number.
VARIABLES = {"STANDIN_LATE_US": "3000"}


def differs(plant: Callable[[], None], tier: dict[str, Any], percent: int) -> dict[str, Any]:
    expected = plain(inner="eager")
    plant()
    budget = max(expected["peaks"]) * percent // 100
    training = Training(options={"memory": budget, **tier})
    for step in range(len(expected["losses"])):
        training.step()
        if training.losses[step] != expected["losses"][step]:
            return {"found_in_step": step, "phase": training.phases[step]}
    assert training.digest() != expected["digest"], "the numbers do not differ without the wait"
    return {"found_in_step": len(expected["losses"])}


HOST = (
    plants.evict_waits_not,
    plants.fetch_waits_not,
    plants.freed_before_copied,
    plants.used_before_fetched,
)
STORE = (plants.store_waits_not,)
CASES = {
    **{plant.__name__: partial(differs, plant, {"host_memory": "512MiB"}, 40) for plant in HOST},
    **{plant.__name__: partial(differs, plant, {"host_memory": "min"}, 40) for plant in STORE},
}
SAMPLE: set[str] = set()
