"""A drive fails in the middle of a training: the numbers are right, or it is said, and the process lives on.

A sample; `tests/long/drive_faults.py` fails every operation in every way."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
import tree
from children import forked
from touch_child import World, is_away, record_of, send_away

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
def test_a_fault_gives_the_right_numbers_or_an_error_of_ours(row: list[Any]) -> None:
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


def test_without_checksums_a_flipped_bit_is_found_out_here() -> None:
    """As wrong numbers: this is what the comparison is for."""
    outcomes = [run["outcome"] for run in runs(json.dumps(WITHOUT_CHECKSUMS), "checksum=off")]
    assert "other numbers" in outcomes


class Fails:
    """A transfer that ends in an error."""

    def __init__(self, error: StoreError) -> None:
        self.error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise self.error


def weight_away() -> tuple[World, torch.Tensor]:
    """A model that trains, and a weight of it that is away."""
    world = World(compiled=True, layers=2)
    world.train(2)
    weight = world.layers[0].head.weight
    send_away([weight])
    assert is_away(weight)
    return world, weight


def test_what_could_not_be_written_stays_for_this_step_and_leaves_whole_in_the_next(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that failed has made no copy: what it was of is still to be written."""
    _, weight = weight_away()
    with torch.no_grad():
        weight.fill_(3)
    with monkeypatch.context() as full:
        full.setattr(Store, "write", lambda *_, **__: Fails(StoreFullError("no room")))
        send_away([weight])
    send_away([weight])
    assert not is_away(weight), "it is tried again in the same step"
    assert engine.ENGINE is not None
    engine.ENGINE.end_step()
    send_away([weight])
    assert is_away(weight) and bool((weight == 3).all())


def test_a_weight_that_cannot_be_brought_back_is_no_number_and_ends_the_training(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a program has ended in the middle, user code could read it unseen: it must not look like one."""
    world, weight = weight_away()
    record = record_of(weight)
    assert record is not None and engine.ENGINE is not None
    with monkeypatch.context() as lost:
        lost.setattr(Store, "read", lambda *_, **__: Fails(StoreReadError("the drive is gone")))
        make_records_resident(engine.ENGINE.residency, [record])
    assert not is_away(weight) and bool(torch.isnan(weight).all())
    with pytest.raises(TornStepError, match=r"the drive is gone.*last checkpoint"):
        world.train(1)
