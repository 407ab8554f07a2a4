"""The CUDA device without a GPU. Its streams, events and pinned copies run on a fake driver with delays."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import SIZE, FakeCuda, FakeStorage

from teraio import _native
from teraio.runtime.device import cuda, pinned_host
from teraio.runtime.device.cuda import CudaDevice
from teraio.runtime.device.pinned_host import HostTier, PinnedBlock

KIB = 1024
GIB = 2**30


def bytes_of(seed: int) -> bytes:
    return random.Random(seed).randbytes(SIZE)


@pytest.mark.parametrize("seed", range(12))
def test_tensor_survives_host_tier_for_any_timing_of_streams(fake: FakeCuda, seed: int) -> None:
    """Evict and fetch six tensors in random order, while memory has room for three of them. The host waits
    for no copy."""
    fake.driver.fake_set(seed * 100, 300)
    device, order = CudaDevice(), random.Random(seed)
    tier, held = HostTier(device, 16 * 2**20), []
    pool: list[int] = []
    tensors = [FakeStorage(fake, pool) for _ in range(6)]
    holds = [bytes_of(seed * 10 + index) for index in range(6)]
    blocks: list[PinnedBlock | None] = [None] * 6
    seen: list[tuple[Any, bytes]] = []
    for index, storage in enumerate(tensors):
        held.append(fake.write(storage, holds[index]))
    for turn in range(40):
        index = order.randrange(6)
        storage, block = tensors[index], blocks[index]
        if block is None:
            block = blocks[index] = tier.reserve(SIZE)
            assert block is not None
            device.end_copy_and_free(device.begin_copy_out(storage, tier.copy_out_starter(block)))
        else:
            pending = device.begin_copy_in(storage, SIZE, tier.copy_in_starter(block, demand=turn % 2 == 0))
            device.end_copy_in(pending)
            tier.release(block)
            blocks[index] = None
            seen.append((fake.read(storage), holds[index]))
            if order.random() < 0.5:
                holds[index] = bytes_of(1000 + turn)
                held.append(fake.write(storage, holds[index]))
    fake.synchronize()
    assert seen
    assert all(buffer.raw == data for buffer, data in seen)


@pytest.mark.parametrize("seed", range(4))
def test_a_tensor_survives_the_ssd_tier(fake: FakeCuda, seed: int, tmp_path: Path) -> None:
    """Move a tensor through pinned slabs and a file.

    The device gives the copier a mark: an event on the compute stream. The copier waits for the mark by the
    event's handle.
    """
    fake.driver.fake_set(seed * 100, 300)
    device = CudaDevice()
    fd = os.open(tmp_path / "store", os.O_RDWR | os.O_CREAT)
    transfers = _native.Transfers(
        _native.ThreadIo([(fd, "store")]), device.allocate_slabs(16 * KIB, 4), copier=device.copier
    )
    os.close(fd)
    storage, data = FakeStorage(fake, []), bytes_of(seed)
    held = fake.write(storage, data)

    class Ticket:
        def __init__(self, number: int) -> None:
            self.number = number

        def done(self) -> bool:
            return transfers.done(self.number)

        def wait(self) -> None:
            transfers.wait(self.number)

    def out(storage: Any, mark: Any) -> Ticket:
        return Ticket(transfers.out(storage.data_ptr(), SIZE, [(0, 0, SIZE)], 1, 1, event=mark.handle))

    def into(storage: Any, mark: Any) -> Ticket:
        return Ticket(transfers.into(storage.data_ptr(), SIZE, [(0, 0, SIZE)], 1, 1, event=mark.handle))

    device.end_copy_and_free(device.begin_copy_out(storage, out))
    device.end_copy_in(device.begin_copy_in(storage, SIZE, into))
    seen = fake.read(storage)
    fake.synchronize()
    assert seen.raw == data == held.raw
    transfers.close()


def test_missing_wait_is_detected_on_the_fake_driver(fake: FakeCuda) -> None:
    """Plant a bug: kernels do not wait for events.

    The compute stream then reuses a tensor's memory before the tensor's copy out has ended.
    """
    wrong = 0
    for seed in range(30):
        fake.driver.fake_set(seed * 10, 2000)
        device = CudaDevice()
        device.make_kernels_wait_for_event = lambda event: None  # type: ignore[method-assign]
        tier, storage = HostTier(device, 16 * 2**20), FakeStorage(fake, [])
        block = tier.reserve(SIZE)
        assert block is not None
        held = fake.write(storage, bytes_of(seed))
        device.end_copy_and_free(device.begin_copy_out(storage, tier.copy_out_starter(block)))
        device.wait_for_copies()
        wrong += ctypes.string_at(block.address, SIZE) != held.raw
        fake.synchronize()
    assert wrong >= 3


@pytest.mark.parametrize("out", [True, False])
def test_large_copy_is_issued_in_pieces_after_the_mark(
    fake: FakeCuda, out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the device's copy stream copies the pieces in the order of their addresses. The first copy
    begins after the kernel that wrote the tensor."""
    monkeypatch.setattr(pinned_host, "PIECE_BYTES", SIZE // 3)
    device = CudaDevice()
    tier, storage, data = HostTier(device, 16 * 2**20), FakeStorage(fake, []), bytes_of(1)
    given, give_to = list[tuple[int, ...]](), device.copier.give_to

    def seen_giving(*about: int) -> int:
        given.append(about)
        return give_to(*about)  # type: ignore[arg-type]

    block = tier.reserve(SIZE)
    assert block is not None
    held = fake.write(storage, data)
    device.end_copy_and_free(device.begin_copy_out(storage, tier.copy_out_starter(block)))
    device.copier = SimpleNamespace(give_to=seen_giving)  # type: ignore[assignment]
    device.end_copy_in(device.begin_copy_in(storage, SIZE, tier.copy_in_starter(block)))
    if out:
        given.clear()
        device.end_copy_without_freeing(device.begin_copy_out(storage, tier.copy_out_starter(block)))
    seen = fake.read(storage)
    stream = (device.evict_stream if out else device.fetch_stream).cuda_stream
    third = SIZE // 3
    assert given == [
        (stream, storage.data_ptr() + start, block.address + start, size, out)
        for start, size in ((0, third), (third, third), (2 * third, SIZE - 2 * third))
    ]
    fake.synchronize()
    assert held and seen.raw == data


def test_refused_copy_raises_and_keeps_the_bytes(fake: FakeCuda) -> None:
    device = CudaDevice()
    tier, storage = HostTier(device, 16 * 2**20), FakeStorage(fake, [])
    block = tier.reserve(SIZE)
    assert block is not None
    fake.driver.fake_fail_next(700)
    with pytest.raises(RuntimeError, match=r"refuses a copy of 64 KiB from the device \(error 700\)"):
        device.begin_copy_out(storage, tier.copy_out_starter(block))
    assert storage.nbytes() == SIZE


@pytest.mark.parametrize("met", [CudaDevice.mark_compute_stream, CudaDevice.join_user_streams])
def test_new_current_stream_waits_for_the_previous_one(
    fake: FakeCuda, met: Callable[[CudaDevice], object]
) -> None:
    """Change the current stream. The new stream must wait for the previous one in two cases: before a move,
    and in `join_user_streams`.
    """
    device, first = CudaDevice(), fake.compute
    storage = FakeStorage(fake, [])
    fake.driver.fake_set(1, 20_000)
    held = fake.write(storage, bytes_of(1))
    fake.compute = fake.Stream()
    met(device)
    seen = fake.read(storage)
    fake.synchronize()
    assert seen.raw == held.raw
    assert fake.compute is not first


def test_moments_measure_runs_of_kernels_and_not_launches(fake: FakeCuda) -> None:
    device = CudaDevice()
    tier = device.make_host_tier(2 * SIZE)
    block = tier.reserve(SIZE)
    assert block is not None
    storage = FakeStorage(fake, [])
    moments = [device.moment_after_kernels()]
    moments[0].synchronize()
    fake.driver.fake_gate.restype = ctypes.c_void_p
    gate = ctypes.c_void_p(fake.driver.fake_gate(fake.compute.handle))
    moments.append(device.moment_after_kernels())
    ticket = tier.copy_out_starter(block)(storage, device.mark_compute_stream())
    asked_ns = time.perf_counter_ns()
    time.sleep(0.05)
    assert not ticket.done(), "the copy waits for the kernel"
    waited_ns = time.perf_counter_ns() - asked_ns
    fake.driver.fake_open(gate)
    moments.append(device.moment_after_kernels())
    started_ns, over_ns, end_ns = device.moments_in_ns(moments)
    assert started_ns == 0 and over_ns >= waited_ns - 1000 and end_ns >= over_ns
    assert device.moments_in_ns(moments[:1]) == [0] and device.moments_in_ns([]) == []
    device.wait_for_copies()
    assert ticket.done()


def test_a_mark_inside_a_side_stream_is_a_programmer_error(fake: FakeCuda) -> None:
    device, own = CudaDevice(), fake.compute
    fake.compute = device.fetch_stream
    with pytest.raises(AssertionError, match="inside a side stream"):
        device.mark_compute_stream()
    fake.compute = own


def test_copy_streams_are_private_and_reused_by_the_next_device(fake: FakeCuda) -> None:
    """The driver creates the copy streams itself, because torch's pool gives one stream to several users.

    When the device is deleted, the next device reuses the streams. They are never destroyed, because torch
    may query them when memory is freed.
    """

    def own(device: CudaDevice) -> set[int]:
        return {s.cuda_stream for s in (device.evict_stream, device.fetch_stream, device.demand_stream)}

    gc.collect()  # this call frees the devices of other tests
    first = CudaDevice()
    second = CudaDevice()
    before, other = own(first), own(second)
    assert len(before | other) == 6
    alive = fake.driver.fake_alive()
    del first
    gc.collect()
    assert fake.driver.fake_alive() == alive
    assert own(CudaDevice()) == before and fake.driver.fake_alive() == alive


def test_freed_memory_is_recorded_on_the_current_stream(fake: FakeCuda) -> None:
    """The memory was allocated on another stream. Without a record of the current stream, torch would give
    the memory to the other stream immediately."""
    device, storage = CudaDevice(), FakeStorage(fake, [])
    fake.compute = fake.Stream()
    device.drop_bytes(storage)
    assert fake.recorded == [(storage, fake.compute)]
    device.resize_storage(storage, SIZE)
    assert len(fake.recorded) == 1


def test_failed_fetch_frees_memory_only_after_its_copy(fake: FakeCuda) -> None:
    fake.driver.fake_set(1, 20_000)
    device, pool = CudaDevice(), list[int]()
    tier, storage = HostTier(device, 16 * 2**20), FakeStorage(fake, pool)
    block = tier.reserve(SIZE)
    assert block is not None
    device.end_copy_and_free(device.begin_copy_out(storage, tier.copy_out_starter(block)))

    def breaks_off(storage: Any, mark: Any) -> Any:
        tier.copy_in_starter(block)(storage, mark)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.begin_copy_in(storage, SIZE, breaks_off)
    other = FakeStorage(fake, pool)
    held = fake.write(other, bytes_of(7))
    seen = fake.read(other)
    fake.synchronize()
    assert seen.raw == held.raw


# ---- the choice of the GPU


def test_device_with_index_ignores_the_current_device(fake: FakeCuda) -> None:
    """User code uses device 0. The streams and the copier belong to device 1."""
    contexts: list[int] = []
    native: Any = cuda._native
    make = native.CudaCopier

    def made() -> Any:
        contexts.append(fake.current_device())
        return make()

    native.CudaCopier = made
    device = CudaDevice(1)
    assert device.device == ("cuda", 1) and contexts == [1]
    streams = (device.evict_stream, device.fetch_stream, device.demand_stream)
    assert [stream.device for stream in streams] == [("cuda", 1)] * 3
    assert fake.current_device() == 0
    device.allocate_slabs(4096, 1)
    assert fake.current_device() == 0
