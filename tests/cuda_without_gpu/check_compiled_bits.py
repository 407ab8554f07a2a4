"""Inductor's kernels in three tiers, to the bit, by Triton's interpreter.

The interpreter computes each kernel in RAM while the host waits. So this compares numbers, and finds no wait
that is missing. The weights have as many bytes as elsewhere, in few layers, and the batch is small: a kernel
takes the interpreter tens of milliseconds.
"""

from __future__ import annotations

from functools import partial

from check_tiers import PARTS, TIERS, train

VARIABLES = {"TRITON_INTERPRET": "1"}
SHAPE = {"vocabulary": 512, "hidden": 512, "intermediate": 1408, "layers": 2}
CASES = {
    f"{tier}_{percent}": partial(train, tier, percent, inner="inductor", shape=SHAPE, rows=1, length=8)
    for tier in TIERS
    for percent in PARTS
}
SAMPLE = {"host_40"}
