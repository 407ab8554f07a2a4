"""Checks of trainings in three tiers, whose Inductor kernels run in Triton's interpreter.

The results must be bitwise equal to the results of a run without a budget. The interpreter computes each
kernel in RAM while the host waits. So these checks compare numbers, but cannot detect a missing wait. The
model has few layers and the batch is small, because the interpreter needs tens of milliseconds per kernel.
The weights are as large as in other checks.
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
