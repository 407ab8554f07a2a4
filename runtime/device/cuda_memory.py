"""Counts of a GPU's memory by torch's caching allocator. They include the whole process and its libraries.

    allocated   live tensors and workspaces, which the budget limits
    reserved    memory that the allocator holds from the driver: allocated blocks and cached free blocks

`reset_peak` resets torch's own peaks. So CudaMemory itself keeps the highest peaks since the last call of
`forget_highest_counts`.
"""

from __future__ import annotations

from typing import Any

import torch

from .device import OrderedDevice, Scratch

MARGIN_PERCENT = 5  # share of the available memory for allocations of the driver and libraries outside torch
LIBRARIES_BYTES = 96 * 2**20  # cuBLAS takes 32 MiB in each thread of forward and autograd on Hopper


class CudaMemory(OrderedDevice):
    """The memory of one GPU."""

    counts_all = True

    def __init__(self, index: int) -> None:
        self.index = index  # a torch call with an index takes a third of the time of a call with a device
        self.device = torch.device("cuda", index)
        self.highest = self.highest_reserved = 0  # the highest peaks up to the last update

    def capacity_bytes(self) -> int:
        """Return the number of bytes that torch's allocator may take. The user can limit it to a part of the
        GPU."""
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        return int(torch.cuda.mem_get_info(self.device)[1] * min(1.0, fraction))

    def available_bytes(self) -> int:
        """Return the sum of two numbers of bytes: (1) free memory, (2) memory that this process's allocator
        holds, in use or cached."""
        free_bytes = int(torch.cuda.mem_get_info(self.device)[0])
        return min(free_bytes + torch.cuda.memory_reserved(self.device), self.capacity_bytes())

    def default_budget_bytes(self) -> int:
        return self.available_bytes() * (100 - MARGIN_PERCENT) // 100

    def _read_allocator_counts(self) -> Any:
        """Return the allocator's counters as torch returns them.

        torch.cuda.memory_allocated and similar functions flatten and sort all counters first. They take ten
        times as long. A measured step reads the counters twice per slot.
        """
        return torch.cuda.memory_stats_as_nested_dict(self.index)

    def used_bytes(self) -> int:
        return int(self._read_allocator_counts()["allocated_bytes"]["all"]["current"])

    def peak_bytes(self) -> int:
        return int(self._read_allocator_counts()["allocated_bytes"]["all"]["peak"])

    def reset_peak(self) -> None:
        self._update_highest_peaks()
        torch.cuda.reset_peak_memory_stats(self.index)

    def _update_highest_peaks(self) -> None:
        counted = self._read_allocator_counts()
        self.highest = max(self.highest, counted["allocated_bytes"]["all"]["peak"])
        self.highest_reserved = max(self.highest_reserved, counted["reserved_bytes"]["all"]["peak"])

    def highest_used_bytes(self) -> int:
        self._update_highest_peaks()
        return self.highest

    def highest_reserved_bytes(self) -> int:
        self._update_highest_peaks()
        return self.highest_reserved

    def forget_highest_counts(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)
        self.highest = self.highest_reserved = 0

    def autotuning_bytes(self, kernel: str) -> int:
        """Return the size of the L2 cache for a Triton kernel, else 0.

        Inductor's autotuner clears the L2 cache between launches with a buffer of this size.
        """
        if not kernel.startswith("triton_"):
            return 0
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def allocate_scratch(self, most_bytes: int, least_bytes: int) -> Scratch | None:
        size, memory = most_bytes, None
        while memory is None and size >= least_bytes:
            try:
                memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                size //= 2
        if memory is None:
            return None
        storage = memory.untyped_storage()

        def fill(data: bytes) -> None:
            memory[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            torch.cuda.synchronize(self.device)

        def free_memory() -> None:
            torch.cuda.synchronize(self.device)
            storage.resize_(0)
            torch.cuda.empty_cache()

        return Scratch(memory.data_ptr(), size, fill, free_memory, storage)

    def library_workspace_bytes(self, budget_bytes: int) -> int:
        return min(LIBRARIES_BYTES, budget_bytes // 8)
