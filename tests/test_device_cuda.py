"""The CUDA device without a GPU: its streams, events and pinned copies on the fake driver, which is late."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import SIZE, FakeCuda, FakeStorage
from torch.utils._python_dispatch import TorchDispatchMode

from teraio import _native
from teraio.runtime import cuda, cuda_memory, measure, pinned
from teraio.runtime.cuda import CudaDevice
from teraio.runtime.pinned import SEGMENT_BYTES, HostTier, Place

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
    for module in (cuda, cuda_memory, pinned):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**about))
    for name in cuda.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pinned, "copy_on", made.copy_on)
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
    device = CudaDevice()
    fake.compute = device.fetch_stream
    with pytest.raises(AssertionError, match="inside a side stream"):
        device.mark()


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


# ---- places in pinned memory


class Toy:
    """Pins nothing: an arena is an address. The driver refuses more than `most` segments."""

    def __init__(self, most: int = 1000) -> None:
        self.at, self.most = GIB, most
        self.pinned: list[tuple[int, threading.Thread]] = []  # how many bytes, on which thread
        self.goes_on = threading.Event()
        self.goes_on.set()

    def slabs(self, slab_bytes: int, count: int) -> Any:
        self.pinned.append((slab_bytes * count, threading.current_thread()))
        if threading.current_thread() is not threading.main_thread():
            assert self.goes_on.wait(60)
        if len(self.pinned) > self.most:
            raise OSError(12, "no")
        self.at += 4 * GIB
        return SimpleNamespace(address=self.at, arena_bytes=slab_bytes * count)


def toy_tier(limit: int, toy: Toy | None = None) -> HostTier:
    return HostTier(toy or Toy(), limit)  # type: ignore[arg-type]


def test_places_never_overlap_and_all_memory_comes_back() -> None:
    tier, order = toy_tier(3 * GIB), random.Random(1)
    live: list[Place] = []
    for _ in range(3000):
        if order.random() < 0.5 and live:
            tier.release(live.pop(order.randrange(len(live))))
        else:
            place = tier.reserve(order.randrange(1, GIB // 4))
            live += [place] if place else []
        edges = sorted(live)
        assert all(one.address + one.size_bytes <= two.address for one, two in pairwise(edges))
    for place in live:
        tier.release(place)
    assert tier.pinned_bytes == 3 * GIB
    assert sorted(place.size_bytes for place in tier._free) == [GIB] * 3


def test_the_limit_is_kept_and_a_freed_place_serves_again() -> None:
    tier = toy_tier(GIB + GIB // 2)
    one, two = tier.reserve(GIB), tier.reserve(GIB // 2)
    assert one and two
    assert tier.reserve(1) is None
    tier.release(one)
    assert tier.reserve(GIB - 5) == one
    assert tier.pinned_bytes == GIB + GIB // 2


def test_a_tensor_larger_than_a_segment_has_one_of_its_own() -> None:
    tier = toy_tier(8 * GIB)
    place = tier.reserve(2 * GIB + 1)
    assert place is not None
    assert place.size_bytes >= 2 * GIB + 1
    assert tier.pinned_bytes == 3 * GIB


def test_when_no_more_can_be_pinned_what_there_is_stays_in_use() -> None:
    tier = toy_tier(8 * GIB, Toy(most=1))
    one = tier.reserve(GIB)
    assert one is not None
    assert tier.reserve(GIB) is None
    assert "no" in str(tier.refused)
    tier.release(one)
    assert tier.reserve(GIB // 2) is not None
    assert tier.reserve(2 * GIB) is None
    assert tier.pinned_bytes == GIB and len(tier.device.pinned) == 2  # type: ignore[attr-defined]


def test_a_thread_pins_the_next_segment_while_there_is_room_in_the_last_one() -> None:
    toy = Toy()
    tier = toy_tier(8 * GIB, toy)
    toy.goes_on.clear()
    places = [tier.reserve(GIB // 4) for _ in range(4)]  # none of them waits for the thread
    deadline = time.monotonic() + 60
    while len(toy.pinned) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [thread is threading.main_thread() for _, thread in toy.pinned] == [True, False]
    assert None not in places and tier.pinned_bytes == GIB
    toy.goes_on.set()
    assert tier.reserve(GIB // 4) is not None  # of the segment that the thread pins, and of no third one
    assert tier.pinned_bytes == 2 * GIB and len(toy.pinned) == 2


def test_a_thread_that_is_refused_ends_nothing() -> None:
    tier = toy_tier(8 * GIB, Toy(most=1))
    assert [tier.reserve(GIB // 4) is None for _ in range(5)] == [False] * 4 + [True]
    assert tier.refused is not None and tier.limit_bytes == GIB


def test_no_more_than_a_segment_is_pinned_ahead_of_need() -> None:
    """The limit is 64 GiB; what one tensor needs may be more than a segment, and the next is as large."""
    for sizes in ([GIB // 10] * 40, [3 * GIB, GIB // 4, GIB // 4], [GIB // 2 + 1] * 5):
        toy = Toy()
        tier = toy_tier(64 * GIB, toy)
        for count, size in enumerate(sizes, 1):
            assert tier.reserve(size) is not None
            whole = -(-max(sizes[:count]) // SEGMENT_BYTES) * SEGMENT_BYTES
            pinned_bytes = sum(size_bytes for size_bytes, _ in toy.pinned)
            assert pinned_bytes <= 2 * sum(sizes[:count]) + 2 * whole
        assert len(toy.pinned) <= len(sizes) + 1


# ---- copies in pieces


@pytest.mark.parametrize("out", [True, False])
def test_a_large_copy_is_given_in_pieces_one_after_the_other(
    out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issued in the order of their addresses; less than two pieces are one copy, as ever."""
    monkeypatch.setattr(pinned, "PIECE_BYTES", 1000)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for size, expected in ((1, [1]), (1999, [1999]), (2000, [1000, 1000]), (3500, [1000, 1000, 1500])):
        tensor, place = torch.randint(0, 256, (2, size), dtype=torch.uint8).unbind()
        place, tensor = place.clone(), tensor.clone()
        with Copies() as copies:
            pinned.copy_on(None, tensor.untyped_storage(), place.data_ptr(), size, out)  # type: ignore[arg-type]
        target, source = (place, tensor) if out else (tensor, place)
        assert torch.equal(target, source)
        assert [count for *_, count in copies.seen] == expected
        starts = [0, *accumulate(expected)][:-1]
        assert [(to - target.data_ptr(), of - source.data_ptr()) for to, of, _ in copies.seen] == [
            (start, start) for start in starts
        ]


class Copies(TorchDispatchMode):
    """Writes down each copy: where to, where from, and its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            self.seen.append((target.data_ptr(), source.data_ptr(), target.numel()))
        return func(*args, **(kwargs or {}))


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
