"""RAM as the device: kernels run when they are called, and a ticket ends with the bytes in place."""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char
from typing import Any

from teraio import _native

from ..torch_extension import allocator
from ..torch_extension.observer import observer_of_process
from . import limits, rss
from .device import OrderedDevice, Scratch

CPU_MARGIN_PERCENT = 10  # of RAM: libraries, the interpreter and the page tables are not in the ledger


class CpuDevice(OrderedDevice):
    """RAM. Kernels run when they are called and tickets end with the bytes in place: nothing to order."""

    kind = "cpu"
    copier = None

    def __init__(self) -> None:
        limits.make_malloc_return_memory()  # of what is not a tensor; without our allocator, of everything
        self.spares = not allocator.install()
        self.sees_pages = not self.spares
        self.freed = _native.spare()
        self.observer = observer_of_process()

    def capacity_bytes(self) -> int:
        return limits.read_memory_limits().capacity_bytes

    def available_bytes(self) -> int:
        return available_bytes()

    def default_budget_bytes(self) -> int:
        return self.available_bytes() * (100 - CPU_MARGIN_PERCENT) // 100

    def used_bytes(self) -> int:
        return self.freed.counts().used_bytes if self.spares else rss.resident_bytes()

    def peak_bytes(self) -> int:
        return self.freed.counts().peak_bytes if self.spares else rss.peak_bytes()

    def reset_peak(self) -> None:
        if self.spares:
            self.freed.reset_peak()
        else:
            rss.reset_peak()

    def limit_tensors_and_spare_memory(self, size_bytes: int) -> None:
        self.freed.keep_within(max(0, size_bytes))

    def release_unused_spare_memory(self) -> None:
        self.freed.end_stretch()

    def is_uncounted_in_used_bytes(self, storage: Any) -> bool:
        """Made before ours was there; small blocks are malloc's, and not asked for."""
        return (
            self.spares
            and storage.nbytes() >= _native.Spare.LEAST
            and not self.freed.holds(storage.data_ptr())
        )

    def allocate_slabs(self, slab_bytes: int, count: int) -> _native.Slabs:
        return _native.Slabs(slab_bytes, count)

    def allocate_scratch(self, most_bytes: int, least_bytes: int) -> Scratch | None:
        memory = mmap.mmap(-1, most_bytes)

        def fill(data: bytes) -> None:
            memory[: len(data)] = data

        return Scratch(addressof(c_char.from_buffer(memory)), most_bytes, fill, memory.close)


def available_bytes() -> int:
    """The smaller of the control group's limit and available memory."""
    return limits.read_memory_limits().obtainable_bytes
