"""Inductor's kernels in three tiers, to the bit, by Triton's interpreter.

The interpreter computes each kernel in RAM while the host waits. So this compares numbers, and finds no wait
that is missing. The weights are as large as elsewhere, and the batch is small: the interpreter takes long.
"""

from __future__ import annotations

from functools import partial

from check_tiers import PARTS, TIERS, train

VARIABLES = {"TRITON_INTERPRET": "1"}
CASES = {
    f"{tier}_{percent}": partial(train, tier, percent, inner="inductor", rows=1, length=8)
    for tier in TIERS
    for percent in PARTS
}
SAMPLE = {"host_40"}
