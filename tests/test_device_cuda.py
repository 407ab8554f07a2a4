"""The CUDA device without a GPU: its streams, events and pinned copies on the fake driver, which is late."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import SIZE, FakeCuda, FakeStorage

from teraio import _native
from teraio.runtime import cuda, cuda_memory, measure, pinned
from teraio.runtime.cuda import CudaDevice
from teraio.runtime.pinned import HostTier, Place

KIB = 1024
GIB = 2**30


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the fake driver with")
    target = tmp_path_factory.mktemp("fake") / "libcuda_fake.so"
    source = Path(__file__).parent / "native" / "fake_cuda.cpp"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", target], check=True
    )
    return str(target)


@pytest.fixture
def fake(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    made = FakeCuda(library)
    made.driver.fake_set(random.randrange(1000), 300)
    inside = SimpleNamespace(_accelerator_setAllocatorSettings=made.settings.append)
    about = {"cuda": made, "device": lambda *about: about, "_C": inside, "__version__": "2.0"}
    about |= {"empty": made.empty, "uint8": None}
    for module in (cuda, cuda_memory, pinned):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**about))
    for name in cuda.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    native = SimpleNamespace(Slabs=_native.Slabs, CudaCopier=lambda: _native.CudaCopier(library))
    monkeypatch.setattr(cuda, "_native", native)
    yield made
    made.synchronize()


def bytes_of(seed: int) -> bytes:
    return random.Random(seed).randbytes(SIZE)


@pytest.mark.parametrize("seed", range(12))
def test_a_tensor_survives_the_host_tier_whatever_the_streams_do(fake: FakeCuda, seed: int) -> None:
    """Six tensors in memory for three, back and forth without ever stopping the host."""
    fake.driver.fake_set(seed * 100, 300)
    device, order = CudaDevice(), random.Random(seed)
    tier, held = HostTier(device, 16 * 2**20), []
    pool: list[int] = []
    tensors = [FakeStorage(fake, pool) for _ in range(6)]
    holds = [bytes_of(seed * 10 + index) for index in range(6)]
    places: list[Place | None] = [None] * 6
    seen: list[tuple[Any, bytes]] = []
    for index, storage in enumerate(tensors):
        held.append(fake.write(storage, holds[index]))
    for turn in range(40):
        index = order.randrange(6)
        storage, place = tensors[index], places[index]
        if place is None:
            place = places[index] = tier.reserve(SIZE)
            assert place is not None
            device.end_evict(device.begin_evict(storage, tier.write(place)))
        else:
            pending = device.begin_fetch(storage, SIZE, tier.read(place, demand=turn % 2 == 0))
            device.end_fetch(pending)
            tier.release(place)
            places[index] = None
            seen.append((fake.read(storage), holds[index]))
            if order.random() < 0.5:
                holds[index] = bytes_of(1000 + turn)
                held.append(fake.write(storage, holds[index]))
    fake.synchronize()
    assert seen
    assert all(buffer.raw == data for buffer, data in seen)


@pytest.mark.parametrize("seed", range(4))
def test_a_tensor_survives_the_ssd_tier(fake: FakeCuda, seed: int, tmp_path: Path) -> None:
    """The same through pinned slabs and a file: the copier waits for the mark by its handle."""
    fake.driver.fake_set(seed * 100, 300)
    device = CudaDevice()
    fd = os.open(tmp_path / "store", os.O_RDWR | os.O_CREAT)
    transfers = _native.Transfers(
        _native.ThreadIo([(fd, "store")]), device.slabs(16 * KIB, 4), copier=device.copier
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

    device.end_evict(device.begin_evict(storage, out))
    device.end_fetch(device.begin_fetch(storage, SIZE, into))
    seen = fake.read(storage)
    fake.synchronize()
    assert seen.raw == data == held.raw
    transfers.close()


def test_a_missing_wait_shows_here_too(fake: FakeCuda) -> None:
    """The compute stream does not wait for the copy out before the memory is used again."""
    wrong = 0
    for seed in range(30):
        fake.driver.fake_set(seed * 10, 2000)
        device = CudaDevice()
        device.compute_waits = lambda event: None  # type: ignore[method-assign]
        tier, storage = HostTier(device, 16 * 2**20), FakeStorage(fake, [])
        place = tier.reserve(SIZE)
        assert place is not None
        held = fake.write(storage, bytes_of(seed))
        device.end_evict(device.begin_evict(storage, tier.write(place)))
        device.drain()
        wrong += ctypes.string_at(place.address, SIZE) != held.raw
        fake.synchronize()
    assert wrong >= 3


@pytest.mark.parametrize("out", [True, False])
def test_a_large_copy_is_given_in_pieces_behind_the_mark(
    fake: FakeCuda, out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their addresses, on the device's streams, and none before the kernel that wrote."""
    monkeypatch.setattr(pinned, "PIECE_BYTES", SIZE // 3)
    device = CudaDevice()
    tier, storage, data = HostTier(device, 16 * 2**20), FakeStorage(fake, []), bytes_of(1)
    given, give_to = list[tuple[int, ...]](), device.copier.give_to

    def seen_giving(*about: int) -> int:
        given.append(about)
        return give_to(*about)  # type: ignore[arg-type]

    place = tier.reserve(SIZE)
    assert place is not None
    held = fake.write(storage, data)
    device.end_evict(device.begin_evict(storage, tier.write(place)))
    device.copier = SimpleNamespace(give_to=seen_giving)  # type: ignore[assignment]
    device.end_fetch(device.begin_fetch(storage, SIZE, tier.read(place)))
    if out:
        given.clear()
        device.keep(device.begin_evict(storage, tier.write(place)))
    seen = fake.read(storage)
    stream = (device.evict_stream if out else device.fetch_stream).cuda_stream
    third = SIZE // 3
    assert given == [
        (stream, storage.data_ptr() + start, place.address + start, size, out)
        for start, size in ((0, third), (third, third), (2 * third, SIZE - 2 * third))
    ]
    fake.synchronize()
    assert held and seen.raw == data


def test_a_copy_that_the_driver_refuses_is_an_error_and_not_lost(fake: FakeCuda) -> None:
    device = CudaDevice()
    tier, storage = HostTier(device, 16 * 2**20), FakeStorage(fake, [])
    place = tier.reserve(SIZE)
    assert place is not None
    fake.driver.fake_fail_next(700)
    with pytest.raises(RuntimeError, match=r"refuses a copy of 64 KiB from the device \(error 700\)"):
        device.begin_evict(storage, tier.write(place))
    assert storage.nbytes() == SIZE


def test_another_current_stream_is_put_behind_the_last_one(fake: FakeCuda) -> None:
    device, first = CudaDevice(), fake.compute
    storage = FakeStorage(fake, [])
    fake.driver.fake_set(1, 20_000)
    held = fake.write(storage, bytes_of(1))
    fake.compute = fake.Stream()
    device.mark()
    seen = fake.read(storage)
    fake.synchronize()
    assert seen.raw == held.raw
    assert fake.compute is not first


def test_time_passes_as_kernels_run_and_not_as_they_are_given(fake: FakeCuda) -> None:
    device = CudaDevice()
    tier = device.host(2 * SIZE)
    place = tier.reserve(SIZE)
    assert place is not None
    storage = FakeStorage(fake, [])
    moments = [device.moment()]
    fake.driver.fake_gate.restype = ctypes.c_void_p
    gate = ctypes.c_void_p(fake.driver.fake_gate(fake.compute.handle))
    moments.append(device.moment())
    ticket = tier.write(place)(storage, device.mark())
    asked_ns = time.perf_counter_ns()
    time.sleep(0.05)
    assert not ticket.done(), "the copy waits for the kernel"
    waited_ns = time.perf_counter_ns() - asked_ns
    fake.driver.fake_open(gate)
    moments.append(device.moment())
    started_ns, over_ns, end_ns = device.times_ns(moments)
    assert started_ns == 0 and over_ns >= waited_ns - 1000 and end_ns >= over_ns
    assert device.times_ns(moments[:1]) == [0] and device.times_ns([]) == []
    device.drain()
    assert ticket.done()


def test_a_mark_inside_a_side_stream_is_a_programmer_error(fake: FakeCuda) -> None:
    device, own = CudaDevice(), fake.compute
    fake.compute = device.fetch_stream
    with pytest.raises(AssertionError, match="inside a side stream"):
        device.mark()
    fake.compute = own


def test_the_budget_is_free_and_held_memory_less_five_percent(fake: FakeCuda) -> None:
    device = CudaDevice()
    assert (device.capacity_bytes(), device.available_bytes(), device.default_budget_bytes()) == (100, 80, 76)


def test_segments_grow_unless_the_user_has_settings_of_their_own(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CudaDevice()
    assert fake.settings == ["expandable_segments:True"]
    del cuda.torch._C._accelerator_setAllocatorSettings
    CudaDevice()
    assert "torch 2.0 has no way" in caplog.text and "PYTORCH_CUDA_ALLOC_CONF" in caplog.text
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    CudaDevice()
    assert fake.settings == ["expandable_segments:True"] and caplog.text.count("has no way") == 1


def test_settings_that_were_made_at_run_time_are_kept_too(fake: FakeCuda) -> None:
    fake.asked_for["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    CudaDevice()
    assert fake.settings == []


def test_segments_do_not_grow_where_the_driver_cannot_map_memory(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "_maps_memory", lambda: False)
    CudaDevice()
    assert fake.settings == [] and "cannot map memory piece by piece" in caplog.text


def test_a_fraction_of_the_card_is_all_that_there_is(fake: FakeCuda) -> None:
    fake.fraction = 0.4
    device = CudaDevice()
    assert (device.capacity_bytes(), device.available_bytes(), device.default_budget_bytes()) == (40, 40, 38)


def test_the_copies_streams_are_nobody_elses(fake: FakeCuda) -> None:
    """Made by the driver, and destroyed with the copier; torch's pool hands out the same ones again."""
    alive = fake.driver.fake_alive()
    device = CudaDevice()
    own = {s.cuda_stream for s in (device.evict_stream, device.fetch_stream, device.demand_stream)}
    assert len(own) == 3 and fake.driver.fake_alive() == alive + 3
    del device
    gc.collect()
    assert fake.driver.fake_alive() == alive


def test_memory_is_given_back_behind_the_stream_that_is_current(fake: FakeCuda) -> None:
    """It may have been made on another one, which would take it at once."""
    device, storage = CudaDevice(), FakeStorage(fake, [])
    fake.compute = fake.Stream()
    device.drop(storage)
    assert fake.recorded == [(storage, fake.compute)]
    device.resize(storage, SIZE)
    assert len(fake.recorded) == 1


def test_a_stream_of_user_code_is_put_behind_the_last_one_though_nothing_moves(fake: FakeCuda) -> None:
    device, storage = CudaDevice(), FakeStorage(fake, [])
    fake.driver.fake_set(1, 20_000)
    held = fake.write(storage, bytes_of(1))
    fake.compute = fake.Stream()
    device.user_code_runs()
    seen = fake.read(storage)
    fake.synchronize()
    assert seen.raw == held.raw


def test_memory_of_a_fetch_that_failed_half_way_is_not_given_back_under_its_copy(fake: FakeCuda) -> None:
    fake.driver.fake_set(1, 20_000)
    device, pool = CudaDevice(), list[int]()
    tier, storage = HostTier(device, 16 * 2**20), FakeStorage(fake, pool)
    place = tier.reserve(SIZE)
    assert place is not None
    device.end_evict(device.begin_evict(storage, tier.write(place)))

    def breaks_off(storage: Any, mark: Any) -> Any:
        tier.read(place)(storage, mark)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.begin_fetch(storage, SIZE, breaks_off)
    other = FakeStorage(fake, pool)
    held = fake.write(other, bytes_of(7))
    seen = fake.read(other)
    fake.synchronize()
    assert seen.raw == held.raw


def test_slabs_of_a_measurement_are_unpinned_when_it_ends(fake: FakeCuda) -> None:
    device = CudaDevice()
    before = fake.driver.fake_pinned()
    slabs = device.slabs(16 * KIB, 4)
    assert fake.driver.fake_pinned() == before + 1
    device.unpin(slabs)
    device.unpin(slabs)
    assert fake.driver.fake_pinned() == before


def test_the_most_that_was_used_outlives_every_reset(fake: FakeCuda) -> None:
    device = CudaDevice()
    for fake.most, highest in ((70, 70), (20, 70), (90, 90), (10, 90)):
        device.reset_peak()
        assert (device.peak_bytes(), device.highest_bytes()) == (0, highest)
    most = cuda_memory.LIBRARIES_BYTES
    assert [device.libraries_bytes(budget) for budget in (2**23, 2**40)] == [2**20, most]


def test_allocated_and_reserved_memory_have_peaks_of_their_own_and_begin_anew(fake: FakeCuda) -> None:
    device = CudaDevice()
    fake.used, fake.most, fake.reserved = 5, 70, 90
    device.reset_peak()
    fake.reserved = 60
    assert (device.used_bytes(), device.highest_bytes(), device.highest_reserved_bytes()) == (5, 70, 90)
    fake.most = 20
    device.forget_highest()
    assert (device.highest_bytes(), device.highest_reserved_bytes()) == (0, 60)


class Card:
    """A card with so many bytes free, as `torch.empty` and what it returns show it."""

    OutOfMemoryError = MemoryError
    uint8 = "uint8"

    def __init__(self, free: int) -> None:
        self.free, self.size, self.emptied = free, 0, 0

    def empty(self, size: int, **about: Any) -> Any:
        if size > self.free:
            raise MemoryError
        self.size = size
        return SimpleNamespace(untyped_storage=lambda: self, data_ptr=lambda: 4096)

    def resize_(self, size: int) -> None:
        self.size = size

    def empty_cache(self) -> None:
        assert self.size == 0, "or nothing goes back to the driver"
        self.emptied += 1


@pytest.mark.parametrize(("free", "found"), [(100, 64), (64, 64), (63, 32), (8, 8), (7, None)])
def test_a_full_card_is_measured_with_what_it_has_and_gets_it_back(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, free: int, found: int | None
) -> None:
    device, card = CudaDevice(), Card(free)
    for name in ("OutOfMemoryError", "uint8", "empty"):
        monkeypatch.setattr(cuda_memory.torch, name, getattr(card, name), raising=False)
    monkeypatch.setattr(fake, "empty_cache", card.empty_cache, raising=False)
    scratch = device.scratch(64, 8)
    assert (scratch and scratch.size_bytes) == found
    if scratch is not None:
        scratch.end()
    assert card.emptied == (scratch is not None)


def test_links_are_measured_with_an_eighth_of_the_budget_at_most() -> None:
    mib = 2**20
    sizes = {budget: measure.memory_bytes(budget * mib) // mib for budget in (4, 16, 40, 57, 1000, 10**5)}
    assert sizes == {4: 2, 16: 2, 40: 4, 57: 4, 1000: 64, 10**5: 128}


def test_only_kernels_that_are_tuned_in_their_first_run_get_room_for_that(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(L2_cache_size=50 * 2**20)
    monkeypatch.setattr(fake, "get_device_properties", lambda device: about, raising=False)
    device = CudaDevice()
    names = ("triton_poi_fused_add_0", "extern_kernels.mm", "addmm_1", "AdamW.step 0.weight")
    assert [device.tries_bytes(name) // 2**20 for name in names] == [50, 0, 0, 0]


def test_memory_that_cannot_be_pinned_is_refused_with_the_remedy(fake: FakeCuda) -> None:
    device = CudaDevice()
    device.copier = SimpleNamespace(pin=lambda slabs: 2)  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"refuses to pin 8 KiB \(error 2\).*ulimit -l"):
        device.slabs(4096, 2)


# ---- which device


def test_the_device_is_the_one_of_its_index_whichever_is_current(fake: FakeCuda) -> None:
    """User code works on device 0; streams and the copier are those of device 1."""
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
    device.slabs(4096, 1)
    assert fake.current_device() == 0
