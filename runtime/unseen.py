"""What kernels take that the ledger does not see: workspaces of libraries, copies in another layout.

    slot i      leaves    the peak begins anew; the ledger knows of so many bytes
    kernel i    runs
    slot i + 1  arrives   what the peak has beyond these was not seen

It is looked at in measured steps, where the device's allocator counts tensors; between programs `outside.py`
looks. In RAM there is much that is no tensor, and tensors that the ledger does not have: what a kernel was
seen to take besides gets room whenever it runs. A GPU's allocator counts every byte, all of them are within
the budget, and libraries keep theirs: there the reserve is at least what was seen at any time. Either way it
is never an error: what cannot be made free is an overrun, and is said.
"""

from __future__ import annotations

from collections.abc import Callable

from .device import Device
from .programs import Program
from .residency import Residency

NOISE_BYTES = 64 << 10  # what is smaller is malloc's, and in blocks whose size is rounded up


def steady(told_bytes: int, seen_bytes: int) -> int:
    """What varies by a little counts as the same: by a few bytes more than they count on, plans that fill the
    budget would come apart."""
    if told_bytes - 2 * NOISE_BYTES < seen_bytes <= told_bytes:
        return told_bytes
    return -(-seen_bytes // NOISE_BYTES) * NOISE_BYTES if seen_bytes >= NOISE_BYTES else 0


class Unseen:
    def __init__(
        self, residency: Residency, device: Device, overrun: Callable[[int, str, str], None]
    ) -> None:
        self.residency = residency
        self.device = device
        self.overrun = overrun
        self.known_bytes: int | None = None  # while a kernel runs that is looked at
        self.others_bytes = 0  # in RAM: tensors that the ledger does not have, since the call began

    def leaves(self, program: Program, index: int, told_bytes: int) -> None:
        """The slot is over, the kernel comes next."""
        device, mover = self.device, self.residency.mover
        if device.sees_pages:
            return
        self.residency.bury(self.residency.mortal)
        if device.counts_all:
            self.known_bytes = mover.resident_bytes + told_bytes
        else:
            if index == 0:
                self.others_bytes = device.used_bytes() - mover.counted_bytes
            self.known_bytes = self.others_bytes + mover.counted_bytes + told_bytes
        device.reset_peak()

    def arrives(self, program: Program, index: int) -> None:
        """The kernel of this slot is over, or given to the device: its memory was taken when it was."""
        known, self.known_bytes = self.known_bytes, None
        if known is None:
            return
        residency, peak, kernel = self.residency, self.device.peak_bytes(), program.stops[index].kernel
        more = peak - known
        if not self.device.counts_all:
            program.unseen_bytes[index] = steady(program.unseen_bytes[index], more)
            peak += residency.reserve_bytes + residency.mover.foreign_bytes - self.others_bytes
            if program.unseen_bytes[index]:
                self._lacks(peak - residency.budget_bytes, kernel)
        elif more > residency.reserve_bytes:
            more -= residency.reserve_bytes
            residency.reserve_bytes += more
            self._lacks(more if residency.elastic else peak - residency.budget_bytes, kernel)

    def room(self, program: Program, index: int, live_bytes: int, tick: int | None) -> int:
        """For a kernel that takes more than it tells, so many bytes with all of it; returns how many of them
        find no room."""
        if not program.unseen_bytes[index]:
            return 0
        residency = self.residency
        short, _ = residency.free(live_bytes, tick)
        short = self._lacks(short, program.stops[index].kernel)
        counts = residency.mover.counts
        counts.peak_bytes = max(counts.peak_bytes, residency.mover.resident_bytes + live_bytes)
        return short

    def _lacks(self, short: int, kernel: str) -> int:
        """So many bytes are missing: the budget grows, if that is how memory was asked for; those that still
        are missing are said, and returned."""
        if short > 0 and self.residency.elastic:
            self.residency.budget_bytes += short
        elif short > 0:
            self.overrun(short, "for itself", f"kernel {kernel}")
            return short
        return 0

    def ends(self) -> None:
        """An exception has ended the program."""
        self.known_bytes = None
