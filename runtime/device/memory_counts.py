"""Counts of a device's memory: used bytes, their peak, and estimates of the bytes that libraries take."""

from __future__ import annotations

from typing import Protocol


class MemoryCounts(Protocol):
    """The counts of a device's memory."""

    sees_pages: bool  # True: `used_bytes` counts written pages of memory, not requested bytes
    counts_all: bool  # True: `used_bytes` also counts the memory of libraries, which the budget limits too
    # True: `used_bytes` is exact, and a collective may free its copies after the wait for its result.
    collectives_free_late: bool

    def used_bytes(self) -> int:
        """Return the number of bytes that this process uses, or 0 if the number is unknown."""
        ...

    def peak_bytes(self) -> int:
        """Return the peak of the used bytes since `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Restart the peak. The process has only one such peak, so user code loses its peak as well."""

    def highest_used_bytes(self) -> int:
        """Return the peak of the used bytes since the last `forget_highest_counts`, or 0 if unknown.

        `reset_peak` does not restart this peak.
        """
        ...

    def highest_reserved_bytes(self) -> int:
        """Return the peak of the reserved bytes since the last `forget_highest_counts`, or 0 if unknown.

        Reserved bytes are the used bytes and the free blocks that the allocator keeps.
        """
        ...

    def forget_highest_counts(self) -> None:
        """Restart the peaks that `highest_used_bytes` and `highest_reserved_bytes` return."""
        ...

    def library_workspace_bytes(self, budget_bytes: int) -> int:
        """Estimate the number of bytes that libraries will take from the budget. The engine uses the estimate
        before it has measured these bytes."""
        ...

    def autotuning_bytes(self, kernel: str) -> int:
        """Return the number of additional bytes that the first run of this kernel may take. The first run
        measures several variants of the kernel."""
        ...


class UncountedMemory:
    """Default methods of MemoryCounts, for a device that counts no memory."""

    sees_pages = False
    counts_all = False
    collectives_free_late = False

    def used_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        pass

    def highest_used_bytes(self) -> int:
        return 0

    def highest_reserved_bytes(self) -> int:
        return 0

    def forget_highest_counts(self) -> None:
        pass

    def library_workspace_bytes(self, budget_bytes: int) -> int:
        return 0

    def autotuning_bytes(self, kernel: str) -> int:
        return 0
