"""Inductor's kernels as Triton compiles them for a GPU, with slots between them, within the budget.

Triton's compiler and launcher are real here. A launched kernel takes its time and writes nothing, so there
are no numbers to compare: what is compared is memory, by torch's own count.
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
