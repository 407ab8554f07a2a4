"""The memory of a fake GPU: capacity, counts, and pinned host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import FakeCuda

from teraio.runtime.device import cuda, cuda_memory
from teraio.runtime.device.cuda import CudaDevice
from teraio.runtime.store import link_probe

KIB = 1024
GIB = 2**30


def test_the_budget_is_free_and_held_memory_less_five_percent(fake: FakeCuda) -> None:
    device = CudaDevice()
    assert (device.capacity_bytes(), device.available_bytes(), device.default_budget_bytes()) == (100, 80, 76)


def test_expandable_segments_are_enabled_unless_user_has_settings(
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


def test_allocator_settings_made_at_run_time_are_kept(fake: FakeCuda) -> None:
    fake.asked_for["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
    CudaDevice()
    assert fake.settings == []


def test_allocator_of_the_user_is_left_unchanged(fake: FakeCuda) -> None:
    def has_none() -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support snapshot")

    fake.memory._snapshot = has_none
    CudaDevice()
    assert fake.settings == []


def test_expandable_segments_are_disabled_if_driver_cannot_map_memory(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "_can_expand_segments", lambda: False)
    CudaDevice()
    assert fake.settings == [] and "cannot map memory piece by piece" in caplog.text


def test_memory_fraction_limits_capacity_and_budget(fake: FakeCuda) -> None:
    fake.fraction = 0.4
    device = CudaDevice()
    assert (device.capacity_bytes(), device.available_bytes(), device.default_budget_bytes()) == (40, 40, 38)


def test_slabs_of_a_measurement_are_unpinned_when_it_ends(fake: FakeCuda) -> None:
    device = CudaDevice()
    before = fake.driver.fake_pinned()
    slabs = device.allocate_slabs(16 * KIB, 4)
    assert fake.driver.fake_pinned() == before + 1
    device.unpin_slabs(slabs)
    device.unpin_slabs(slabs)
    assert fake.driver.fake_pinned() == before


def test_highest_used_bytes_survive_a_reset_of_the_peak(fake: FakeCuda) -> None:
    device = CudaDevice()
    for fake.most, highest in ((70, 70), (20, 70), (90, 90), (10, 90)):
        device.reset_peak()
        assert (device.peak_bytes(), device.highest_used_bytes()) == (0, highest)
    most = cuda_memory.LIBRARIES_BYTES
    assert [device.library_workspace_bytes(budget) for budget in (2**23, 2**40)] == [2**20, most]


def test_allocated_and_reserved_peaks_are_separate_and_restart(fake: FakeCuda) -> None:
    device = CudaDevice()
    fake.used, fake.most, fake.reserved = 5, 70, 90
    device.reset_peak()
    fake.reserved = 60
    assert (device.used_bytes(), device.highest_used_bytes(), device.highest_reserved_bytes()) == (5, 70, 90)
    fake.most = 20
    device.forget_highest_counts()
    assert (device.highest_used_bytes(), device.highest_reserved_bytes()) == (0, 60)


class Card:
    """A GPU with the given number of free bytes. `empty` replaces `torch.empty`."""

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
        assert self.size == 0, "the memory is still in use"
        self.emptied += 1


@pytest.mark.parametrize(("free", "found"), [(100, 64), (64, 64), (63, 32), (8, 8), (7, None)])
def test_scratch_on_full_gpu_is_halved_and_freed(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, free: int, found: int | None
) -> None:
    device, card = CudaDevice(), Card(free)
    for name in ("OutOfMemoryError", "uint8", "empty"):
        monkeypatch.setattr(cuda_memory.torch, name, getattr(card, name), raising=False)
    monkeypatch.setattr(fake, "empty_cache", card.empty_cache, raising=False)
    scratch = device.allocate_scratch(64, 8)
    assert (scratch and scratch.size_bytes) == found
    if scratch is not None:
        scratch.end()
    assert card.emptied == (scratch is not None)


def test_links_are_measured_with_an_eighth_of_the_budget_at_most() -> None:
    mib = 2**20
    sizes = {
        budget: link_probe.memory_bytes_for_probe(budget * mib) // mib
        for budget in (4, 16, 40, 57, 1000, 10**5)
    }
    assert sizes == {4: 2, 16: 2, 40: 4, 57: 4, 1000: 64, 10**5: 128}


def test_only_autotuned_kernels_have_autotuning_bytes(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = SimpleNamespace(L2_cache_size=50 * 2**20)
    monkeypatch.setattr(fake, "get_device_properties", lambda device: about, raising=False)
    device = CudaDevice()
    names = ("triton_poi_fused_add_0", "extern_kernels.mm", "addmm_1", "AdamW.step 0.weight")
    assert [device.autotuning_bytes(name) // 2**20 for name in names] == [50, 0, 0, 0]


def test_memory_that_cannot_be_pinned_is_refused_with_the_remedy(fake: FakeCuda) -> None:
    device = CudaDevice()
    device.copier = SimpleNamespace(pin=lambda slabs: 2)  # type: ignore[assignment]
    with pytest.raises(OSError, match=r"refuses to pin 8 KiB \(error 2\).*ulimit -l"):
        device.allocate_slabs(4096, 2)
