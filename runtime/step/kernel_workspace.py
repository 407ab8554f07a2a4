"""What kernels take that the ledger does not see: workspaces of libraries, copies in another layout.

    slot i      leaves    the peak begins anew; the ledger knows of so many bytes
    kernel i    runs
    slot i + 1  arrives   what the peak has beyond these was not seen

It is looked at in measured steps, where the device's allocator counts tensors; between programs
`eager_memory.py` looks. What a kernel was seen to take besides gets room whenever it runs. It is never an
error: what cannot be made free is an overrun, and is said.

A GPU's allocator counts every byte, and all of them are within the budget. Two kinds are told apart there:

    lasting     still there when the kernel is over: cuBLAS keeps its workspace. The reserve grows to it at
                once. At the first slot of a measured step nothing else is unseen: the reserve is set to it.
    its own     came and went while the kernel ran: room for this kernel alone.

While a kernel runs for the first time, libraries also try things: Inductor's autotuner takes a buffer of the
size of the L2 cache. What came and went then has room in the next measured run, which decides.
"""

from __future__ import annotations

from collections.abc import Callable

from ..device.device import Device
from ..ledger.residency import Residency
from .program import Program

NOISE_BYTES = 64 << 10  # what is smaller is malloc's, and in blocks whose size is rounded up


def filter_noise(told_bytes: int, seen_bytes: int, least_bytes: int = NOISE_BYTES) -> int:
    """What varies by a little counts as the same: by a few bytes more than they count on, plans that fill the
    budget would come apart. Less than `least_bytes` is nothing."""
    if told_bytes - 2 * NOISE_BYTES < seen_bytes <= told_bytes:
        return told_bytes
    return -(-seen_bytes // NOISE_BYTES) * NOISE_BYTES if seen_bytes >= least_bytes else 0


class KernelWorkspace:
    def __init__(
        self, residency: Residency, device: Device, overrun: Callable[[int, str, str], None]
    ) -> None:
        self.residency = residency
        self.device = device
        self.overrun = overrun
        self.least_bytes = residency.reserve_bytes  # of the reserve
        self.known_bytes: int | None = None  # while a kernel runs that is looked at
        self.others_bytes = 0  # in RAM: tensors that the ledger does not have, since the call began

    def measure_and_reserve_lasting_bytes(self, step: bool) -> None:
        """The arguments of a measured call are in the ledger, and nothing of it is there yet. `step`: the
        step begins with it."""
        if self.device.counts_all:
            residency = self.residency
            residency.forget_dead_records()
            lasting = self.device.used_bytes() - residency.mover.resident_bytes
            self._raise_reserve_to(lasting)
            if step:
                residency.reserve_bytes = max(lasting, self.least_bytes + residency.kept_bytes)

    def begin_kernel_measure(self, program: Program, index: int, told_bytes: int) -> None:
        """The slot is over, the kernel comes next."""
        device, mover = self.device, self.residency.mover
        if device.sees_pages:
            return
        self.residency.forget_dead_records(self.residency.mortal)
        if device.counts_all:
            self.known_bytes = mover.resident_bytes + told_bytes
        else:
            if index == 0:
                self.others_bytes = device.used_bytes() - mover.device_counted_bytes
            self.known_bytes = self.others_bytes + mover.device_counted_bytes + told_bytes
        device.reset_peak()

    def end_kernel_measure(self, program: Program, index: int) -> int:
        """The kernel of this slot is over, or given to the device: its memory was taken when it was. Returns
        how many bytes more it is now known to take than when it began."""
        known, self.known_bytes = self.known_bytes, None
        if known is None:
            return 0
        residency, peak, kernel = self.residency, self.device.peak_bytes(), program.stops[index].kernel
        told, more = program.unseen_bytes[index], peak - known
        if self.device.counts_all:
            self._split_lasting_from_own(program, index, known, peak)
        else:
            program.unseen_bytes[index] = filter_noise(told, more)
            peak += residency.reserve_bytes + residency.mover.foreign_bytes - self.others_bytes
            if program.unseen_bytes[index]:
                self._grow_budget_or_overrun(peak - residency.budget_bytes, kernel)
        return max(0, program.unseen_bytes[index] - told)

    def _split_lasting_from_own(self, program: Program, index: int, known: int, peak: int) -> None:
        """Tell what lasts of the bytes beyond those known from what came and went."""
        residency = self.residency
        grown = peak - known > residency.reserve_bytes and self._raise_reserve_to(
            self.device.used_bytes() - known
        )
        own = filter_noise(program.unseen_bytes[index], peak - known - residency.reserve_bytes, 1)
        first = program.tried_bytes[index] is None
        program.tried_bytes[index] = own if first else 0
        if not first:
            program.unseen_bytes[index] = own
        if (own or grown) and not (first and residency.elastic):
            self._grow_budget_or_overrun(peak - residency.budget_bytes, program.stops[index].kernel)

    def _raise_reserve_to(self, size_bytes: int) -> bool:
        """So many bytes are there whatever runs. Whether that is more than the reserve had."""
        more = size_bytes - self.residency.reserve_bytes
        if more > 0:
            self.residency.reserve_bytes += more
            self.residency.budget_bytes += more if self.residency.elastic else 0
        return more > 0

    def make_room_for_kernel(
        self, program: Program, index: int, live_bytes: int, tick: int | None, measured: bool = False
    ) -> int:
        """For a kernel that takes more than it tells, so many bytes with all of it; returns how many of them
        find no room. In a measured step, room for what may be tried, too."""
        tried = self._autotuning_bytes(program, index) if measured else 0
        if not (program.unseen_bytes[index] or tried):
            return 0
        residency = self.residency
        short, _ = residency.evict_until_fits(live_bytes + tried, tick)
        short = self._grow_budget_or_overrun(max(0, short - tried), program.stops[index].kernel)
        counts = residency.mover.counts
        counts.peak_bytes = max(counts.peak_bytes, residency.mover.resident_bytes + live_bytes)
        return short

    def _autotuning_bytes(self, program: Program, index: int) -> int:
        if not self.device.counts_all:
            return 0
        tried = program.tried_bytes[index]
        return self.device.autotuning_bytes(program.stops[index].kernel) if tried is None else tried

    def _grow_budget_or_overrun(self, short: int, kernel: str) -> int:
        """So many bytes are missing: the budget grows, if that is how memory was asked for; those that still
        are missing are said, and returned."""
        if short > 0 and self.residency.elastic:
            self.residency.budget_bytes += short
        elif short > 0:
            self.overrun(short, "for itself", f"kernel {kernel}")
            return short
        return 0

    def abandon_kernel_measure(self) -> None:
        """An exception has ended the program."""
        self.known_bytes = None
