"""The wait for tensors that a collective's thread frees late."""

from __future__ import annotations

import time
from typing import Any

import pytest

from teraio.formats.schedule import Schedule, Slot
from teraio.runtime.device.memory_counts import UncountedMemory
from teraio.runtime.ledger.mover import Mover
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.step import late_frees
from teraio.runtime.step.late_frees import LateFrees
from teraio.runtime.step.program import Program

pytestmark = pytest.mark.fast
MIB = 2**20


class Memory(UncountedMemory):
    """Memory in which another thread frees `late` bytes at the given time."""

    collectives_free_late = True

    def __init__(self) -> None:
        self.used, self.late, self.free_at = 10 * MIB, 0, 0.0

    def used_bytes(self) -> int:
        return self.used + (self.late if time.perf_counter() < self.free_at else 0)


@pytest.fixture
def memory() -> Memory:
    return Memory()


class Slots:
    """A program with two kernels. The second has 2 MiB of memory that is older than its slot."""

    def __init__(self, frees: LateFrees, symbolic: bool = False) -> None:
        slots = (
            Slot("enter", (), (), 0),
            Slot("gather", (), (), 5 * MIB),
            Slot("matmul", (), (), 6 * MIB, older_bytes=2 * MIB),
        )
        self.frees, self.program = frees, Program(Schedule("forward", (), slots, symbolic))

    def are_late(self, index: int) -> bool:
        return self.frees.are_late(self.program, index, self.program.unmovable_bytes_at_slot(index))

    def run(self, index: int) -> float:
        """Run the slot, and return the seconds that it took."""
        began = time.perf_counter()
        self.frees.run_slot(self.program, index, self.program.unmovable_bytes_at_slot(index))
        return time.perf_counter() - began


@pytest.fixture
def frees(memory: Memory) -> LateFrees:
    """Return the wait. The engine knows 6 MiB of tensors, and user code has 4 MiB."""
    device: Any = memory
    mover: Any = Mover.__new__(Mover)
    mover.device, mover.resident_bytes, mover.foreign_bytes = device, 6 * MIB, 0
    residency: Any = Residency.__new__(Residency)
    residency.mover = mover
    residency.forget_dead_records = lambda: None
    return LateFrees(residency, device)


@pytest.fixture
def slots(frees: LateFrees) -> Slots:
    """Return a program of which a call has begun."""
    slots = Slots(frees)
    slots.run(0)
    return slots


def test_engine_sleeps_until_a_late_tensor_is_freed(
    memory: Memory, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_frees, "PATIENCE_S", 10.0)
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 0.05
    assert slots.are_late(1)
    slots.run(1)
    assert memory.used_bytes() == memory.used and time.perf_counter() < memory.free_at + 5
    assert not slots.are_late(1)


def test_engine_does_not_wait_for_older_bytes_of_the_program(memory: Memory, slots: Slots) -> None:
    memory.used += 2 * MIB
    assert not slots.are_late(2) and slots.run(2) < late_frees.PATIENCE_S


@pytest.mark.parametrize("index", (1, 2))
def test_bytes_that_the_next_kernel_will_allocate_do_not_hide_late_bytes(
    memory: Memory, slots: Slots, index: int
) -> None:
    slots.program.note_unseen_bytes(index, 8 * MIB)
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 60
    assert slots.are_late(index) and slots.run(index) >= late_frees.PATIENCE_S


def test_live_bytes_count_as_older_if_they_depend_on_the_batch(memory: Memory, frees: LateFrees) -> None:
    slots = Slots(frees, symbolic=True)
    slots.run(0)
    memory.late, memory.free_at = 5 * MIB, time.perf_counter() + 60
    assert not slots.are_late(1)
    memory.late = 6 * MIB
    assert slots.are_late(1)


def test_other_memory_is_waited_for_once_per_call(memory: Memory, slots: Slots) -> None:
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 60
    assert slots.run(1) >= late_frees.PATIENCE_S
    assert slots.run(1) < late_frees.PATIENCE_S
    memory.used += 2 * MIB
    assert slots.run(1) >= late_frees.PATIENCE_S
    slots.run(0)
    assert slots.run(1) < late_frees.PATIENCE_S


def test_device_without_exact_counts_is_not_asked(memory: Memory, slots: Slots) -> None:
    memory.collectives_free_late = False
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 60
    assert not slots.are_late(1) and slots.run(1) < late_frees.PATIENCE_S
