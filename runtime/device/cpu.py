"""RAM as the device whose memory the budget limits.

A CPU kernel ends before its call returns. The host waits for a copy until the bytes are in place. So copies
and kernels need no further waits.
"""

from __future__ import annotations

import mmap
from ctypes import addressof, c_char
from typing import Any

from teraio import _native

from ..torch_extension import allocator
from ..torch_extension.observer import observer_of_process
from . import limits, rss
from .device import OrderedDevice, Scratch

CPU_MARGIN_PERCENT = 10  # share of RAM for libraries, the interpreter and page tables, beside the budget


class CpuDevice(OrderedDevice):
    """RAM as the memory that the budget limits."""

    kind = "cpu"
    copier = None

    def __init__(self) -> None:
        limits.make_malloc_return_memory()  # malloc allocates tensors if teraio's allocator is not installed
        self.spares = not allocator.install()
        self.sees_pages, self.collectives_free_late = not self.spares, self.spares
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
        """Return True if the storage was allocated before teraio's allocator was installed.

        Return False for every small storage: malloc allocates small storages, so teraio's allocator has no
        information about them.
        """
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
    """Return the smaller of two numbers of bytes: the available RAM, and the control group's limit."""
    return limits.read_memory_limits().obtainable_bytes
