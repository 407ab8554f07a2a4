"""Faults of a drive during training.

After a fault, either the numbers are right or an error is raised, and the process can train again. This file
tests a sample. `tests/long/drive_faults.py` makes every operation fail in every way.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
import tree
from children import forked
from touch_child import World, evict_all, is_evicted, record_of

from teraio.errors import StoreError, StoreFullError, StoreReadError, TornStepError
from teraio.runtime.engine import engine
from teraio.runtime.ledger.restore import make_records_resident
from teraio.runtime.store.store import Store

CHILD = tree.SUPPORT / "fault_loop.py"
SAMPLE = [
    ["EIO", "read", "once", 5, 61, 1],
    ["EIO", "write", "sticky", 2, 50, 2],
    ["ENOSPC", "write", "sticky", 30, 60, 2],
    ["short", "any", "once", 9, 101, 2],
    ["stall", "read", "once", 21, 61, 2],
    ["drop", "write", "once", 40, 60, 1],
    ["flip", "read", "once", 11, 45, 2],
    ["stale", "read", "sticky", 50, 60, 1],
    ["neighbour", "write", "once", 33, 60, 2],
]
WITHOUT_CHECKSUMS = [["flip", "read", "once", 8, 23, 3]]


@cache
def runs(rows: str, *options: str) -> list[dict[str, Any]]:
    done = forked(CHILD, rows, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    operations = lines[0]["operations"]
    assert min(operations.values()) > 50, f"too little moves for faults to matter: {operations}"
    return lines[1:]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: "-".join(map(str, row[:3])))
def test_fault_gives_same_numbers_or_teraio_error(row: list[Any]) -> None:
    kind, op, how, *_, count = row
    mine = [
        run
        for run in runs(json.dumps(SAMPLE))
        if (run["kind"], run["op"], run["sticky"]) == (kind, op, how == "sticky")
    ]
    assert len(mine) == count
    for run in mine:
        assert run["hits"] > 0, "nothing failed"
        assert run["outcome"] == "same" or run["outcome"].endswith("Error"), run
        assert run["after"] == "same", run
        if kind in {"flip", "stale", "neighbour"} and op == "read":
            assert run["outcome"] in {"CorruptTensorError", "TornStepError", "EvictedError"}, run
        if kind in {"EIO", "short"} and how == "once":
            assert run["outcome"] == "same", run


def test_flipped_bit_without_checksums_changes_numbers() -> None:
    """Flip a bit while checksums are off. No error is raised, but the numbers differ from a training without
    faults."""
    outcomes = [run["outcome"] for run in runs(json.dumps(WITHOUT_CHECKSUMS), "checksum=off")]
    assert "other numbers" in outcomes


class Fails:
    """A transfer whose wait raises an error."""

    def __init__(self, error: StoreError) -> None:
        self.error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise self.error


def evicted_weight() -> tuple[World, torch.Tensor]:
    """Train the toy model and evict one of its weights. Return the training and the weight."""
    world = World(compiled=True, layers=2)
    world.train(2)
    weight = world.layers[0].head.weight
    evict_all([weight])
    assert is_evicted(weight)
    return world, weight


def test_failed_write_keeps_tensor_resident_until_next_step(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed write makes no valid copy, so the engine must write the tensor again in the next step."""
    _, weight = evicted_weight()
    with torch.no_grad():
        weight.fill_(3)
    with monkeypatch.context() as full:
        full.setattr(Store, "write", lambda *_, **__: Fails(StoreFullError("no room")))
        evict_all([weight])
    evict_all([weight])
    assert not is_evicted(weight), "the engine tried again in the same step"
    assert engine.ENGINE is not None
    engine.ENGINE.end_step()
    evict_all([weight])
    assert is_evicted(weight) and bool((weight == 3).all())


def test_failed_fetch_sets_weight_to_nan_and_ends_training(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a weight contains NaN after its fetch has failed.

    The engine no longer notices when user code reads the weight, so old values must not look valid.
    """
    world, weight = evicted_weight()
    record = record_of(weight)
    assert record is not None and engine.ENGINE is not None
    with monkeypatch.context() as lost:
        lost.setattr(Store, "read", lambda *_, **__: Fails(StoreReadError("the drive is gone")))
        make_records_resident(engine.ENGINE.residency, [record])
    assert not is_evicted(weight) and bool(torch.isnan(weight).all())
    with pytest.raises(TornStepError, match=r"the drive is gone.*last checkpoint"):
        world.train(1)
