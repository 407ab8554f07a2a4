"""The device has less memory than the budget: others took it. Nothing is lost, and nothing is read unseen."""

from __future__ import annotations

from functools import partial
from typing import Any

from check_loops import same, within
from check_streams import TIGHT, batch
from full_device import STEPS, Full, trained, trained_without_one_batch

import teraio


def check_one_fetch_without_memory_changes_nothing() -> dict[str, Any]:
    """Ahead of its use it is put off; a demanded one evicts what may leave, and succeeds."""
    full = Full(setattr)
    full.once = True
    same(partial(trained, batch=batch, full=full), memory=TIGHT)
    assert full.refused >= STEPS // 2, full.refused
    return {"refused": full.refused}


def check_a_batch_that_finds_no_memory_is_left_out_as_loops_do() -> dict[str, Any]:
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
