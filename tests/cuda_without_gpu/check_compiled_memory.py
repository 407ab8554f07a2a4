"""Checks that Inductor's compiled programs keep to the budget. Slots (calls of the engine) run between their
kernels.

Triton compiles the kernels for a GPU. Its compiler and launcher are real here. But a launched kernel only
takes its set duration and writes nothing, so the checks cannot compare numbers. Instead, they compare the
budget with the memory that torch's own allocator counts.
"""

from __future__ import annotations

from functools import partial

from check_tiers import PARTS, TIERS, train

CASES = {
    f"{tier}_{percent}": partial(train, tier, percent, numbers=False, inner="inductor")
    for tier in TIERS
    for percent in PARTS
}
SAMPLE: set[str] = set()
