"""What the ledger does not see of a GPU's memory: workspaces of libraries, what a kernel takes for itself,
blocks of the allocator that are larger than what was asked for, and what else the process has there.

    slot i      leaves    the peak begins anew; the ledger knows of so many bytes
    kernel i    runs
    slot i + 1  arrives   what the peak has beyond these was not seen: the reserve is at least that much

There the allocator counts every byte, and all of them are within the budget. So it is looked at in measured
steps; between programs `outside.py` looks. In RAM, where the process has much that is no tensor, nobody does.
"""

from __future__ import annotations

from collections.abc import Callable

from .device import Device
from .residency import Residency


class Unseen:
    def __init__(
        self, residency: Residency, device: Device, overrun: Callable[[int, str, str], None]
    ) -> None:
        self.residency = residency
        self.device = device
        self.overrun = overrun
        self.known_bytes: int | None = None  # while a kernel runs that is looked at

    def leaves(self, live_bytes: int) -> None:
        """The slot is over, the kernel comes next."""
        if self.device.counts_all:
            self.known_bytes = self.residency.mover.resident_bytes + live_bytes
            self.device.reset_peak()

    def arrives(self, kernel: str) -> None:
        """The kernel is over, or given to the device: its memory was taken when it was."""
        known, self.known_bytes = self.known_bytes, None
        if known is None:
            return
        residency = self.residency
        peak = self.device.peak_bytes()
        more = peak - known - residency.reserve_bytes
        if more <= 0:
            return
        residency.reserve_bytes += more
        if residency.elastic:
            residency.budget_bytes += more
        elif peak > residency.budget_bytes:
            self.overrun(peak - residency.budget_bytes, "for itself", f"kernel {kernel}")

    def ends(self) -> None:
        """An exception has ended the program."""
        self.known_bytes = None
