"""Checks that programs of Inductor's kernels keep to the budget. Triton compiles the kernels for a GPU, and
slots run between the kernels.

Triton's compiler and launcher are real here. A launched kernel takes its set duration but writes nothing, so
the checks cannot compare numbers. Instead, the checks compare the budget with the memory that torch's own
allocator counts.
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
