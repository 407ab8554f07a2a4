"""Counts of a GPU's memory, from torch's caching allocator. The counts include all tensors of the process,
and the workspaces that libraries take from torch.

    allocated   live tensors and workspaces, which the budget limits
    reserved    memory that the allocator holds from the driver: allocated blocks and cached free blocks

`reset_peak` resets torch's own peaks. So CudaMemory also stores the highest peaks since the last call of
`forget_highest_counts`.
"""

from __future__ import annotations

from typing import Any

import torch

from .device import OrderedDevice, Scratch

MARGIN_PERCENT = 5  # share of the available memory for the driver, and for libraries that bypass torch
LIBRARIES_BYTES = 96 * 2**20  # on Hopper, cuBLAS takes 32 MiB each in the main and in autograd's thread


class CudaMemory(OrderedDevice):
    """The memory of one GPU."""

    counts_all = True

    def __init__(self, index: int) -> None:
        self.index = index  # calls of torch are three times as fast with an index as with a torch.device
        self.device = torch.device("cuda", index)
        self.highest = self.highest_reserved = 0  # highest peaks that `_update_highest_peaks` has read

    def capacity_bytes(self) -> int:
        """Return the number of bytes that torch's allocator may take. The user can limit the process to a
        fraction of the GPU's memory."""
        fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        return int(torch.cuda.mem_get_info(self.device)[1] * min(1.0, fraction))

    def available_bytes(self) -> int:
        """Return the bytes that this process can use: the GPU's free memory, plus the memory that the process
        already holds, but at most the capacity."""
        free_bytes = int(torch.cuda.mem_get_info(self.device)[0])
        return min(free_bytes + torch.cuda.memory_reserved(self.device), self.capacity_bytes())

    def default_budget_bytes(self) -> int:
        return self.available_bytes() * (100 - MARGIN_PERCENT) // 100

    def _read_allocator_counts(self) -> Any:
        """Return the allocator's counters as torch returns them.

        torch.cuda.memory_allocated and similar functions take ten times as long, because they first flatten
        and sort all counters. In a measured step, the engine reads the counters twice at each slot.
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
        """Return the size of the L2 cache if the kernel is a Triton kernel, otherwise 0.

        Inductor's autotuner allocates a buffer of the size of the L2 cache. It clears the cache with this
        buffer between launches.
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
