"""Checks of a device whose free memory is smaller than the budget. No bytes may be lost, and no kernel may
read the bytes of an evicted tensor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from check_loops import same, within
from check_streams import TIGHT, batch
from full_device import STEPS, Full, trained, trained_without_one_batch

import teraio


def check_one_fetch_without_memory_changes_nothing() -> dict[str, Any]:
    """Check that a prefetch without free memory is delayed.

    When the tensor is needed, the engine evicts other tensors, and the fetch succeeds.
    """
    full = Full(setattr)
    full.once = True
    same(partial(trained, batch=batch, full=full), memory=TIGHT)
    assert full.refused >= STEPS // 2, full.refused
    return {"refused": full.refused}


def check_a_batch_without_memory_is_skipped() -> dict[str, Any]:
    full = Full(setattr)
    refused = {}
    for after in (0, 1, 3, 6):
        with within(True, memory=TIGHT) as (called, model):
            full.refused = 0
            trained_without_one_batch(called, model, batch, full, after, views=6)
            refused[after] = full.refused
            assert teraio.stats()["evictions"]
    assert sum(refused.values()), refused
    return {"refused": refused}
