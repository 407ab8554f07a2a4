"""Whatever the delays, the whole engine never lets a kernel read what is not there: random programs, budgets
and plans on the fake asynchronous device.

tests/long/engine_schedules.py runs as many as there is time for, from where this ends.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_device import CELL, EngineDevice
from engine_run import run
from fake_device import Event

from teraio.runtime.device.pending_transfer import Mark, Pending, Start
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.record import Record

SCHEDULES = 150
PLANTED = 40


@pytest.fixture(autouse=True)
def _little_to_collect() -> Iterator[None]:
    """The end of an engine looks for garbage, among all that torch has made: 0.4 s for each schedule."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_no_schedule_of_the_engine_lets_a_kernel_read_what_is_not_there(tmp_path: Path) -> None:
    """Every read is right, within the budget, over both stores and all kinds of plans; and much moves."""
    done: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        faults, one = run(seed, tmp_path)
        assert faults == [], f"seed {seed}"
        done.update(asdict(one.engine.mover.counts))
        done[one.plans] += 1
        done["native" if one.native else "streams"] += 1
        done["host"] += one.host_cells > 0
    print(dict(done))
    assert min(done[kind] for kind in ("none", "gaps", "hostile", "greedy")) > SCHEDULES / 10
    assert min(done["native"], done["streams"]) > SCHEDULES / 3
    assert done["evictions"] > 8 * SCHEDULES
    assert done["fetches"] > 12 * SCHEDULES
    assert done["drops"] > SCHEDULES / 2
    assert done["misses"] > 4 * SCHEDULES
    assert done["planned_moves"] > 30 * SCHEDULES
    assert done["host"] > SCHEDULES / 3
    assert done["to_host_bytes"] > 4 * CELL * SCHEDULES
    assert done["from_host_bytes"] > 4 * CELL * SCHEDULES


# ---- each wait, left out


class FreesBeforeTheCopy(EngineDevice):
    """The wait before memory of an evicted tensor is used again."""

    def end_copy_and_free(self, pending: Pending) -> None:
        self.resize_storage(pending.storage, 0)


class ReadsBeforeTheCopy(EngineDevice):
    """The wait before a fetched tensor is read."""

    def end_copy_in(self, pending: Pending) -> bool:
        return False


class EvictsBeforeCompute(EngineDevice):
    """The copy's wait for the kernel that wrote the tensor."""

    def begin_copy_out(self, storage: torch.UntypedStorage, start: Start) -> Pending:
        never = Event()
        mark = Mark(never, self.number_of(never))
        return Pending(storage, self._with_address(start)(storage, mark), mark)


class FetchesBeforeCompute(EngineDevice):
    """The copy's wait for the kernels that used its memory before."""

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        self.resize_storage(storage, size_bytes)
        never = Event()
        mark = Mark(never, self.number_of(never))
        return Pending(storage, self._with_address(start)(storage, mark), mark)


@pytest.mark.parametrize(
    "planted", [FreesBeforeTheCopy, ReadsBeforeTheCopy, EvictsBeforeCompute, FetchesBeforeCompute]
)
def test_a_missing_wait_is_caught(planted: type[EngineDevice], tmp_path: Path) -> None:
    """Over either store a kernel reads something else; an assertion of the engine or the store counts too."""
    caught: Counter[str] = Counter()
    for seed in range(PLANTED):
        try:
            faults, one = run(seed, tmp_path, planted)
        except AssertionError:
            caught["assertion"] += 1
        else:
            caught["native" if one.native else "streams"] += bool(faults)
    print(planted.__name__, dict(caught))
    assert sum(caught.values()) >= PLANTED / 10, f"{planted.__doc__} Left out, and only {caught} noticed"
    assert caught["native"] + caught["streams"] >= 3


def keeps_the_place(mover: Mover, record: Record) -> None:
    """What is written to the SSD has an older copy in host memory still."""


def gives_back_early(
    mover: Mover, record: Record, demand: bool, read: Any = Mover._read_starter_of_copy
) -> Start:
    """The place of a tensor that is being fetched is another's."""
    start: Start = read(mover, record, demand)
    if record.place is not None:
        mover.host.release(record.place)  # type: ignore[union-attr]
    return start


@pytest.mark.parametrize(
    ("name", "bug"), [("_give_up_place", keeps_the_place), ("_read_starter_of_copy", gives_back_early)]
)
def test_a_bug_with_host_memory_is_caught(
    name: str, bug: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mover, name, bug)
    caught = 0
    for seed in range(PLANTED // 2):
        try:
            caught += bool(run(seed, tmp_path)[0])
        except AssertionError:
            caught += 1
    assert caught >= 3


def test_a_seed_is_a_schedule_of_the_engine(tmp_path: Path) -> None:
    for seed in range(4):
        (_, one), (_, two) = run(seed, tmp_path), run(seed, tmp_path)
        assert (one.world.now, one.number) == (two.world.now, two.number)
