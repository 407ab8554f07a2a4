"""The memory of a device in figures: what is used, the most that was, and what libraries may take of it."""

from __future__ import annotations

from typing import Protocol


class MemoryCounts(Protocol):
    """The figures that a device has of its memory."""

    sees_pages: bool  # `used_bytes` counts memory that was written to, not what was asked for
    counts_all: bool  # `used_bytes` counts all that the budget is for, libraries' and others' too

    def used_bytes(self) -> int:
        """By everything in this process; 0 where it is not known."""
        ...

    def peak_bytes(self) -> int:
        """The most that was used since `reset_peak`, which is the process's own: others see it reset."""
        ...

    def reset_peak(self) -> None: ...

    def highest_used_bytes(self) -> int:
        """The most that was used since `forget_highest_counts`, whatever was reset. 0: unknown."""
        ...

    def highest_reserved_bytes(self) -> int:
        """Likewise, with what its allocator keeps for tensors to come."""
        ...

    def forget_highest_counts(self) -> None:
        """Count the most that was used from now on."""
        ...

    def library_workspace_bytes(self, budget_bytes: int) -> int:
        """Return how much of such a budget libraries may take before anything is measured."""
        ...

    def autotuning_bytes(self, kernel: str) -> int:
        """Return how much the first run of this kernel may take to try its variants."""
        ...


class UncountedMemory:
    """A device that says nothing."""

    sees_pages = False
    counts_all = False

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
