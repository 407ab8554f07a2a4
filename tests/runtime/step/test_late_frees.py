"""The wait for tensors that a collective's thread frees late."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from teraio.runtime.device.memory_counts import UncountedMemory
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.step import late_frees
from teraio.runtime.step.late_frees import LateFrees

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


@pytest.fixture
def frees(memory: Memory) -> LateFrees:
    """Begin a call. The engine knows 6 MiB of tensors, and user code has 4 MiB."""
    residency: Any = Residency.__new__(Residency)
    residency.mover = SimpleNamespace(device_counted_bytes=6 * MIB)
    residency.forget_dead_records = lambda: None
    device: Any = memory
    frees = LateFrees(residency, device)
    frees.begin_call(0)
    return frees


def seconds_of_wait(frees: LateFrees, live_bytes: int) -> float:
    began = time.perf_counter()
    frees.await_frees(live_bytes)
    return time.perf_counter() - began


def test_engine_sleeps_until_a_late_tensor_is_freed(
    memory: Memory, frees: LateFrees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_frees, "PATIENCE_S", 10.0)
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 0.05
    frees.await_frees(0)
    assert memory.used_bytes() == memory.used and time.perf_counter() < memory.free_at + 5


def test_engine_does_not_wait_for_bytes_of_the_program(memory: Memory, frees: LateFrees) -> None:
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 60
    assert seconds_of_wait(frees, live_bytes=3 * MIB) < late_frees.PATIENCE_S


def test_other_memory_is_waited_for_once_per_call(memory: Memory, frees: LateFrees) -> None:
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 60
    assert seconds_of_wait(frees, 0) >= late_frees.PATIENCE_S
    assert seconds_of_wait(frees, 0) < late_frees.PATIENCE_S
    memory.used += 2 * MIB
    assert seconds_of_wait(frees, 0) >= late_frees.PATIENCE_S
    frees.begin_call(0)
    assert seconds_of_wait(frees, 0) < late_frees.PATIENCE_S


def test_device_without_exact_counts_is_not_asked(memory: Memory, frees: LateFrees) -> None:
    memory.collectives_free_late = False
    memory.late, memory.free_at = 3 * MIB, time.perf_counter() + 60
    assert seconds_of_wait(frees, 0) < late_frees.PATIENCE_S
