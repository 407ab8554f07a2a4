"""Random schedules of the whole engine. Every kernel reads correct bytes, whatever the delays.

The tests run random programs, budgets and plans on the fake asynchronous device.
tests/long/engine_schedules.py tries further seeds.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_device import CELL, EngineDevice
from engine_run import run
from fake_device import Event

from teraio.passes.slots.layout import _Layout
from teraio.runtime.device.pending_transfer import Mark, Pending, Start
from teraio.runtime.engine.engine import Engine, OpenSlot
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.record import Record, State
from teraio.runtime.step.plan_follower import PlanFollower

SCHEDULES = 150
PLANTED = 40
COLLECTIVES = 50


@pytest.fixture(autouse=True)
def _hide_torch_from_collector() -> Iterator[None]:
    """Hide torch's objects from the garbage collector, because collecting them takes 0.4 s after each
    schedule."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_kernels_read_correct_bytes_in_random_schedules(tmp_path: Path) -> None:
    """Check that every run is within its budget.

    The runs use two kinds of stores and all kinds of plans, and make many moves.
    """
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


# ---- devices that lack a wait


class FreesBeforeTheCopy(EngineDevice):
    """A device that frees an evicted tensor's memory before the tensor's copy has ended."""

    def end_copy_and_free(self, pending: Pending) -> None:
        self.resize_storage(pending.storage, 0)


class ReadsBeforeTheCopy(EngineDevice):
    """A device that reports a tensor as fetched before the tensor's copy has ended."""

    def end_copy_in(self, pending: Pending) -> bool:
        return False


class EvictsBeforeCompute(EngineDevice):
    """A device that copies a tensor out without waiting for the kernel that wrote the tensor."""

    def begin_copy_out(self, storage: torch.UntypedStorage, start: Start) -> Pending:
        never = Event()
        mark = Mark(never, self.number_of(never))
        return Pending(storage, self._with_address(start)(storage, mark), mark)


class FetchesBeforeCompute(EngineDevice):
    """A device that copies a tensor in without waiting for the kernels that used the same memory earlier."""

    def begin_copy_in(self, storage: Any, size_bytes: int, start: Start) -> Pending:
        self.resize_storage(storage, size_bytes)
        never = Event()
        mark = Mark(never, self.number_of(never))
        return Pending(storage, self._with_address(start)(storage, mark), mark)


@pytest.mark.parametrize(
    "planted", [FreesBeforeTheCopy, ReadsBeforeTheCopy, EvictsBeforeCompute, FetchesBeforeCompute]
)
def test_a_missing_wait_is_caught(planted: type[EngineDevice], tmp_path: Path) -> None:
    """Check that a missing wait has one of two results, with either store. A kernel reads wrong bytes, or an
    assertion of the engine or the store fails."""
    caught: Counter[str] = Counter()
    for seed in range(PLANTED):
        try:
            faults, one = run(seed, tmp_path, planted)
        except AssertionError:
            caught["assertion"] += 1
        else:
            caught["native" if one.native else "streams"] += bool(faults)
    print(planted.__name__, dict(caught))
    assert sum(caught.values()) >= PLANTED / 10, f"{planted.__doc__} Only {caught} noticed"
    assert caught["native"] + caught["streams"] >= 3


def keep_place(mover: Mover, record: Record) -> None:
    """Plant a bug: when a record is written to the SSD, its older copy in host memory is kept."""


def release_place_early(
    mover: Mover, record: Record, demand: bool, read: Any = Mover._read_starter_of_copy
) -> Start:
    """Plant a bug: release a record's place in host memory while a fetch from this place is in flight."""
    start: Start = read(mover, record, demand)
    if record.place is not None:
        mover.host.release(record.place)  # type: ignore[union-attr]
    return start


@pytest.mark.parametrize(
    ("name", "bug"), [("_release_place", keep_place), ("_read_starter_of_copy", release_place_early)]
)
def test_planted_bug_with_host_memory_is_caught(
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


def test_records_of_the_next_kernel_are_in_use_during_the_moves_of_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a slot's records are in use during the slot's moves.

    A step's first slot may end the previous step, and then the slot's number advances. In this test, each
    first slot advances the number and requires a record.
    """
    slots: list[tuple[Engine, OpenSlot]] = []
    required_at_first: list[int] = []
    open_slot, carry_out = Engine.open_slot, PlanFollower.carry_out

    def note_slot(engine: Engine, *given: Any) -> OpenSlot:
        slot = open_slot(engine, *given)
        if slot.at == 0:
            engine.residency.advance_slot()
            resident = (r for r in engine.residency.records.values() if r.state is State.RESIDENT)
            slot = slot._replace(needed=[record for record in resident if record.evictable][:1])
        slots.append((engine, slot))
        return slot

    def check_use(follower: PlanFollower, *given: Any) -> None:
        engine, slot = slots[-1]
        assert all(map(engine.residency.in_use, slot.required_records)), f"slot {slot.at}"
        required_at_first.append(len(slot.required_records) if slot.at == 0 else 0)
        carry_out(follower, *given)

    monkeypatch.setattr(Engine, "open_slot", note_slot)
    monkeypatch.setattr(PlanFollower, "carry_out", check_use)
    for seed in range(8):
        run(seed, tmp_path)
    assert len(required_at_first) > 20 and any(required_at_first)


def test_same_seed_gives_the_same_schedule(tmp_path: Path) -> None:
    for seed in range(4):
        (_, one), (_, two) = run(seed, tmp_path), run(seed, tmp_path)
        assert (one.world.now, one.number) == (two.world.now, two.number)


# ---- collectives


def test_tensors_in_flight_are_resident_until_the_wait(tmp_path: Path) -> None:
    """Check random schedules whose programs have collectives. A collective runs on a stream of its own, and
    its buffers are poisoned until its end."""
    done: Counter[str] = Counter()
    for seed in range(COLLECTIVES):
        faults, one = run(seed, tmp_path, collectives=True)
        assert faults == [], f"seed {seed}"
        done.update(asdict(one.engine.mover.counts))
    assert done["evictions"] > 8 * COLLECTIVES
    assert done["fetches"] > 12 * COLLECTIVES
    assert done["planned_moves"] > 30 * COLLECTIVES


def test_an_eviction_before_the_wait_is_caught(tmp_path: Path) -> None:
    """Check that the test above finds faults if slots do not know the tensors in flight."""
    caught = 0
    with patch.object(_Layout, "_add_tensors_in_flight", lambda self, flags: None):
        for seed in range(PLANTED):
            try:
                faults, _ = run(seed, tmp_path, collectives=True)
            except AssertionError:
                faults = ["assertion"]
            caught += bool(faults)
    assert caught >= PLANTED / 10, f"only {caught} noticed"
