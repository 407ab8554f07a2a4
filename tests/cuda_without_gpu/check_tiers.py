"""Checks of trainings that evict to host memory, to the SSD, or to both.

The results are bitwise equal to a run without a budget. The memory that torch counts keeps to the budget.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from small_llama import Training, plain

TIERS: dict[str, dict[str, Any]] = {
    "host": {"host_memory": "512MiB"},
    "host_and_ssd": {"host_memory": "16MiB"},
    "ssd": {"host_memory": "min"},
    "steps_on_host": {"host_memory": "512MiB", "optimizer_step": "host"},
}
PARTS = (60, 40, 25)


def train(tier: str, percent: int, numbers: bool = True, **shape: Any) -> dict[str, Any]:
    """Train with a budget of `percent` percent of the peak memory of the run without a budget.

    If `numbers` is True, check that both runs have the same losses and parameters.
    """
    expected = plain(**shape)
    budget = max(expected["peaks"]) * percent // 100
    training = Training(options={"memory": budget, **TIERS[tier]}, **shape).train()
    results = training.results()
    assert "planned" in training.phases, training.phases
    if numbers:
        assert all(math.isfinite(float.fromhex(loss)) for loss in results["losses"]), results["losses"]
        assert results["losses"] == expected["losses"], (results["losses"], expected["losses"])
        assert results["digest"] == expected["digest"]
    highest = {
        phase: max(p for p, q in zip(training.peaks, training.phases) if q == phase)
        for phase in training.phases
    }
    figures = {
        "budget": budget,
        "plain_peak": max(expected["peaks"]),
        "peaks": highest,
        "phases": training.phases,
    }
    over = {phase: peak for phase, peak in highest.items() if peak > budget}
    assert not over, figures
    return figures


CASES = {
    f"eager_{tier}_{percent}": partial(train, tier, percent, inner="eager")
    for tier in TIERS
    for percent in PARTS
}
SAMPLE = {"eager_ssd_25", "eager_steps_on_host_40"}
