"""Tests of transfers of device tensors through pinned slabs, on a fake driver.

A missing wait makes a test read poison bytes.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from transfer_rig import BLOCK, Memory, facts

from teraio import _native
from teraio.errors import CorruptTensorError, StoreError

SLAB = 16 * BLOCK
SIZE = 5 * SLAB + 100
POISON = bytes([0xDD]) * SIZE


def handle(event: ctypes.c_void_p | None) -> int:
    return (event.value or 0) if event else 0


class Device:
    """A test setup with the fake driver, a compute stream, and a transfer engine with the CUDA copier."""

    def __init__(self, fake_driver: str, seed: int = 1, delay_us: int = 3000) -> None:
        self.cuda = ctypes.CDLL(fake_driver)
        self.cuda.fake_alloc.restype = ctypes.c_uint64
        self.cuda.fake_set(seed, delay_us)
        self.compute = self.make("cuStreamCreate")
        self.copier: Any = _native.CudaCopier(fake_driver)
        self.io = _native.MemoryIo(depth=3)
        self.slabs = _native.Slabs(SLAB, 4)
        assert self.copier.pin(self.slabs) == 0
        self.t = _native.Transfers(self.io, self.slabs, copier=self.copier)

    def make(self, call: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        assert self.cuda[call](ctypes.byref(handle), 0) == 0
        return handle

    def alloc(self, size: int = SIZE) -> int:
        return self.cuda.fake_alloc(ctypes.c_size_t(size))

    def recorded(self) -> ctypes.c_void_p:
        event = self.make("cuEventCreate")
        assert self.cuda.cuEventRecord(event, self.compute) == 0
        return event

    def kernel_write(self, address: int, source: Memory) -> None:
        size = ctypes.c_size_t(source.size)
        self.cuda.fake_kernel_write(
            self.compute, ctypes.c_uint64(address), ctypes.c_void_p(source.address), size
        )

    def kernel_read(self, target: Memory, address: int) -> None:
        size = ctypes.c_size_t(target.size)
        self.cuda.fake_kernel_read(
            self.compute, ctypes.c_void_p(target.address), ctypes.c_uint64(address), size
        )

    def evict(self, address: int, event: ctypes.c_void_p | None) -> None:
        assert self.t.wait(self.t.out(address, SIZE, [(0, 0, SIZE)], 1, 1, event=handle(event)))

    def fetch(self, address: int, event: ctypes.c_void_p | None) -> None:
        assert self.t.wait(self.t.into(address, SIZE, [(0, 0, SIZE)], 1, 1, event=handle(event)))

    def stored(self) -> bytes:
        return self.io.peek(0, 0, SIZE)


@pytest.fixture
def device(fake_driver: str) -> Iterator[Device]:
    made = Device(fake_driver)
    yield made
    made.t.close()
    made.cuda.cuStreamDestroy_v2(made.compute)


@pytest.mark.parametrize("seed", range(5))
def test_eviction_waits_for_the_kernel_that_makes_the_tensor(fake_driver: str, seed: int) -> None:
    device = Device(fake_driver, seed)
    source, address = Memory(SIZE, seed=seed), device.alloc()
    device.kernel_write(address, source)
    device.evict(address, device.recorded())
    # The fake driver fills freed memory with poison immediately.
    device.cuda.fake_free(ctypes.c_uint64(address), ctypes.c_size_t(SIZE))
    assert device.stored() == source.get()
    assert device.t.close()


@pytest.mark.parametrize("seed", range(5))
def test_fetch_waits_for_last_use_of_its_memory(fake_driver: str, seed: int) -> None:
    device = Device(fake_driver, seed)
    source, address = Memory(SIZE, seed=seed), device.alloc()
    device.kernel_write(address, source)
    device.evict(address, device.recorded())
    old, seen, reused = Memory(SIZE, seed=77), Memory(SIZE), device.alloc()
    device.kernel_write(reused, old)
    device.kernel_read(seen, reused)
    device.fetch(reused, device.recorded())
    assert ctypes.string_at(reused, SIZE) == source.get()
    device.cuda.cuEventSynchronize(device.recorded())
    assert seen.get() == old.get()
    assert device.t.close()


def test_fake_driver_shows_a_missing_wait(device: Device) -> None:
    source = Memory(SIZE, seed=1)
    never = device.make("cuEventCreate")
    device.cuda.fake_gate.restype = ctypes.c_void_p
    for event in (None, never):
        address = device.alloc()
        gate = ctypes.c_void_p(device.cuda.fake_gate(device.compute))
        device.kernel_write(address, source)
        device.evict(address, event)
        assert device.stored() == POISON
        device.cuda.fake_open(gate)
        device.evict(address, device.recorded())
        assert device.stored() == source.get()


def test_wrong_bytes_never_reach_the_device(device: Device) -> None:
    source, address = Memory(SIZE, seed=1), device.alloc()
    device.kernel_write(address, source)
    device.evict(address, device.recorded())
    device.io.poke(0, 7, b"\x00\x01\x02")
    target = device.alloc()
    with pytest.raises(CorruptTensorError):
        device.fetch(target, None)
    assert ctypes.string_at(target, SLAB) == POISON[:SLAB]


@pytest.mark.parametrize("way", ["evict", "fetch"])
def test_driver_error_fails_the_transfer(device: Device, way: str) -> None:
    source, address = Memory(SIZE, seed=1), device.alloc()
    device.kernel_write(address, source)
    device.evict(address, device.recorded())
    device.cuda.fake_fail_next(719)
    with pytest.raises(StoreError, match="driver error 719") as caught:
        getattr(device, way)(address, None)
    assert facts(caught).kind == "copy"
    if way == "evict":
        device.evict(address, None)
    device.fetch(address, None)
    assert ctypes.string_at(address, SIZE) == source.get()


def test_failed_stream_is_never_used_again(device: Device) -> None:
    """Check that the copier uses a new stream after an error.

    On the old stream, queued copies may still write to a slab that already has a new use.
    """
    gc.collect()
    address = device.alloc()
    device.evict(address, None)
    alive = device.cuda.fake_alive()
    device.cuda.fake_fail_next(719)
    with pytest.raises(StoreError):
        device.evict(address, None)
    device.evict(address, None)
    assert device.cuda.fake_alive() == alive + 2, "a new stream and a new event"


def test_streams_events_and_pins_are_released(fake_driver: str) -> None:
    gc.collect()
    device = Device(fake_driver)
    cuda, before = device.cuda, device.cuda.fake_alive()
    source, address = Memory(SIZE, seed=1), device.alloc()
    device.kernel_write(address, source)
    for _ in range(10):
        device.evict(address, None)
        device.fetch(address, None)
    assert before < cuda.fake_alive() <= before + 2 * 3
    assert device.t.close()
    del device
    gc.collect()
    assert cuda.fake_alive() == before - 1


def test_memory_is_unpinned_after_its_last_copy(fake_driver: str) -> None:
    """Destroy the copier while a stream of torch still copies to pinned memory. The copier does not use this
    stream."""
    gc.collect()
    device = Device(fake_driver, delay_us=20_000)
    cuda, compute = device.cuda, device.compute
    cuda.fake_unpinned_under_a_copy()
    address, size = ctypes.c_uint64(device.alloc()), ctypes.c_size_t(BLOCK)
    for _ in range(5):
        cuda.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(device.slabs.address), address, size, compute)
    assert device.t.close()
    del device
    gc.collect()
    assert cuda.fake_unpinned_under_a_copy() == 0
    cuda.cuStreamDestroy_v2(compute)


def test_copier_keeps_the_current_device_of_its_caller(fake_driver: str) -> None:
    """Use a copier of device 1 while device 0 is the current device of user code."""
    cuda = ctypes.CDLL(fake_driver)
    cuda.fake_use(1)
    copier = _native.CudaCopier(fake_driver)
    cuda.fake_use(0)
    slabs = _native.Slabs(SLAB, 1)
    assert copier.pin(slabs) == 0
    assert cuda.fake_current() == 0
    del copier
    gc.collect()
    assert cuda.fake_current() == 0


def test_missing_driver_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no CUDA driver"):
        _native.CudaCopier("libcuda_that_is_not_there.so.1")
    with pytest.raises(RuntimeError, match="has no cu"):
        _native.CudaCopier("libc.so.6")
