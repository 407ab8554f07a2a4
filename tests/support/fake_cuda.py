"""A fake of the parts of `torch.cuda` that teraio's CUDA device uses. The fake calls a fake CUDA driver in
tests/native, whose streams run late.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from teraio import _native
from teraio.runtime.device import cuda, cuda_memory, pinned_host

SIZE = 64 * 1024  # the size of every storage in bytes


def _classes(driver: Any) -> tuple[Any, Any, Any]:
    """Return fakes of torch's classes Event, Stream and ExternalStream, which call this driver."""

    class FakeEvent:
        def __init__(self, enable_timing: bool = False) -> None:
            self.handle, self.timed = ctypes.c_void_p(), enable_timing
            driver.cuEventCreate(ctypes.byref(self.handle), 0)

        def query(self) -> bool:
            return driver.cuEventQuery(self.handle) == 0

        def synchronize(self) -> None:
            driver.cuEventSynchronize(self.handle)

        def elapsed_time(self, later: FakeEvent) -> float:
            assert self.timed and later.timed
            found = ctypes.c_float()
            assert driver.cuEventElapsedTime(ctypes.byref(found), self.handle, later.handle) == 0
            return found.value

        @property
        def cuda_event(self) -> int:
            return self.handle.value or 0

        def record(self, stream: FakeStream) -> None:
            driver.cuEventRecord(self.handle, stream.handle)

        def __del__(self) -> None:
            driver.cuEventDestroy_v2(self.handle)

    class FakeStream:
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.handle, self.device = ctypes.c_void_p(), device
            driver.cuStreamCreate(ctypes.byref(self.handle), 0)

        @property
        def cuda_stream(self) -> int:
            return self.handle.value or 0

        def wait_event(self, event: FakeEvent) -> None:
            driver.cuStreamWaitEvent(self.handle, event.handle, 0)

        def wait_stream(self, other: FakeStream) -> None:
            event = FakeEvent()
            event.record(other)
            self.wait_event(event)

        def synchronize(self) -> None:
            event = FakeEvent()
            event.record(self)
            driver.cuEventSynchronize(event.handle)

    class FakeExternalStream(FakeStream):
        def __init__(self, handle: int, device: Any = None) -> None:
            self.handle, self.device = ctypes.c_void_p(handle), device

    return FakeEvent, FakeStream, FakeExternalStream


class FakeCuda:
    """A fake of `torch.cuda`. Its kernels read and write real bytes."""

    def __init__(self, library: str) -> None:
        self.driver = ctypes.CDLL(library)
        self.driver.fake_alloc.restype = ctypes.c_uint64
        self.Event, self.Stream, self.ExternalStream = _classes(self.driver)
        self.asked_for: dict[str, str] = {}  # the user's settings of the allocator
        self.fraction = 1.0
        self.memory = SimpleNamespace(_snapshot=lambda: {"allocator_settings": self.asked_for})
        self.recorded: list[tuple[FakeStorage, Any]] = []  # (storage, stream) of each record_stream call
        self.compute: Any = self.Stream()
        self.free, self.total, self.reserved, self.used, self.most = 30, 100, 50, 0, 0
        self.settings: list[str] = []

    def current_device(self) -> int:
        return int(self.driver.fake_current())

    @contextmanager
    def device(self, device: tuple[str, int]) -> Iterator[None]:
        before = self.current_device()
        self.driver.fake_use(device[1])
        yield
        self.driver.fake_use(before)

    def synchronize(self, device: Any = None) -> None:
        self.compute.synchronize()

    def current_stream(self, device: Any = None) -> Any:
        return self.compute

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free, self.total

    def get_per_process_memory_fraction(self, device: Any = None) -> float:
        return self.fraction

    def empty(self, *about: Any, **more: Any) -> Any:
        """Return a fake of an empty tensor. Its `set_` takes a storage, and returns an object whose
        `record_stream` adds (storage, stream) to `recorded`.
        """

        def take(storage: FakeStorage) -> Any:
            return SimpleNamespace(record_stream=lambda stream: self.recorded.append((storage, stream)))

        return SimpleNamespace(set_=take)

    def memory_reserved(self, device: Any = None) -> int:
        return self.reserved

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, dict[str, dict[str, int]]]:
        used = {"allocated_bytes": (self.used, self.most), "reserved_bytes": (self.reserved, self.reserved)}
        return {pool: {"all": {"current": now, "peak": most}} for pool, (now, most) in used.items()}

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self.most = 0

    # ---- kernels of a program

    def write(self, storage: FakeStorage, data: bytes) -> Any:
        """Launch a kernel that writes `data`. Return an object that must be kept alive until the kernel has
        run.
        """
        held = ctypes.create_string_buffer(data, len(data))
        self.write_at(storage.data_ptr(), held)
        return held

    def write_at(self, address: int, held: Any) -> None:
        self.driver.fake_kernel_write(
            self.compute.handle, ctypes.c_uint64(address), held, ctypes.c_size_t(len(held))
        )

    def read(self, storage: FakeStorage) -> Any:
        """Launch a kernel that reads the storage. Return the buffer that the kernel fills when it runs."""
        seen = ctypes.create_string_buffer(SIZE)
        address = ctypes.c_uint64(storage.data_ptr())
        self.driver.fake_kernel_read(self.compute.handle, seen, address, ctypes.c_size_t(SIZE))
        return seen


POISON = ctypes.create_string_buffer(b"\xdd" * SIZE, SIZE)


class Place(NamedTuple):
    """A device, like `torch.device`."""

    type: str
    number: int


class FakeStorage:
    """A fake storage. A kernel on the compute stream overwrites its freed memory with POISON, and the next
    storage reuses this memory immediately.
    """

    pool: list[int]
    device = Place("cuda", 0)

    def __init__(self, fake: FakeCuda, pool: list[int]) -> None:
        self.fake = fake
        self.pool = pool
        self.address = 0
        self.resize_(SIZE)

    def resize_(self, size: int) -> None:
        if size:
            assert not self.address
            self.address = (
                self.pool.pop() if self.pool else self.fake.driver.fake_alloc(ctypes.c_size_t(SIZE))
            )
        else:
            self.fake.write_at(self.address, POISON)
            self.pool.append(self.address)
            self.address = 0

    def nbytes(self) -> int:
        return SIZE if self.address else 0

    def data_ptr(self) -> int:
        assert self.address, "an evicted storage is used"
        return self.address


@contextmanager
def installed(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Replace torch by a fake, and the driver by a fake driver, in all modules of the CUDA device."""
    made = FakeCuda(library)
    made.driver.fake_set(random.randrange(1000), 300)
    inside = SimpleNamespace(_accelerator_setAllocatorSettings=made.settings.append)
    about = {"cuda": made, "device": lambda *about: about, "_C": inside, "__version__": "2.0"}
    about |= {"empty": made.empty, "uint8": None}
    for module in (cuda, cuda_memory, pinned_host):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**about))
    for name in cuda.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    native = SimpleNamespace(Slabs=_native.Slabs, CudaCopier=lambda: _native.CudaCopier(library))
    monkeypatch.setattr(cuda, "_native", native)
    # No observer, because the real observer works only with torch's storages, and these storages are fake.
    monkeypatch.setattr(cuda, "observer_of_process", lambda: None)
    yield made
    made.synchronize()
