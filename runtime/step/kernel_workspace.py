"""Workspace: bytes that kernels take in addition to the tensors that the engine knows. Examples are buffers
of libraries, and copies in another layout.

    slot i      ends      the device's peak is reset; the bytes of known tensors are noted
    kernel i    runs
    slot i + 1  begins    the peak minus the noted bytes is the kernel's workspace

The engine measures workspace in measured steps, if the device's allocator counts tensors. In later steps, the
engine makes room for a kernel's workspace whenever the kernel runs. If bytes cannot be made free, a warning
reports them as an overrun. This is never an error. Memory between programs is measured by `eager_memory.py`.

A GPU's allocator counts every byte, and all bytes are within the budget. A GPU has two kinds of workspace:

    lasting     still allocated when the kernel has ended, like cuBLAS's workspace. If it exceeds the reserve,
                the reserve grows immediately. At the first slot of a measured step, the reserve is set to
                its size. At that slot, lasting workspace is the only memory without a known tensor.
    own         freed again before the kernel ended. Only this kernel gets room for its own workspace.

In a kernel's first run, libraries may try variants of the kernel, and take more workspace for this. For
example, Inductor's autotuner takes a buffer of the size of the L2 cache. In the second measured run, the
kernel gets room for all workspace that its first run freed. In later runs, it gets room for the workspace of
the second run.
"""

from __future__ import annotations

from ..device.device import Device
from ..ledger.residency import Residency
from .program import Program

NOISE_BYTES = 64 << 10  # bookkeeping of malloc and rounding of blocks take less than this


def filter_noise(told_bytes: int, seen_bytes: int, least_bytes: int = NOISE_BYTES) -> int:
    """Return the number of bytes of workspace to expect. `seen_bytes` is the measured number, and
    `told_bytes` the number expected so far.

    If `seen_bytes` equals `told_bytes` or is slightly smaller, return `told_bytes`. If `seen_bytes` is below
    `least_bytes`, return 0. Otherwise round `seen_bytes` up. Plans fill the budget, so a few bytes more than
    planned would cause fetches on demand.
    """
    if told_bytes - 2 * NOISE_BYTES < seen_bytes <= told_bytes:
        return told_bytes
    return -(-seen_bytes // NOISE_BYTES) * NOISE_BYTES if seen_bytes >= least_bytes else 0


class KernelWorkspace:
    """The measurement of the workspace of kernels, and the evictions that make room for it."""

    def __init__(self, residency: Residency, device: Device) -> None:
        self.residency = residency
        self.device = device
        self.least_bytes = residency.reserve_bytes  # the smallest reserve
        # Expected used bytes without workspace; None unless a measured kernel runs.
        self.known_bytes: int | None = None
        self.others_bytes = 0  # At the call's begin: bytes of tensors in RAM that the engine does not know.

    def measure_and_reserve_lasting_bytes(self, step: bool) -> None:
        """Measure lasting workspace at the first slot of a measured call, and reserve its bytes. Lasting
        workspace is still allocated when its kernel has ended. `step` is True if this call is the first of
        the step."""
        if self.device.counts_all:
            residency = self.residency
            residency.forget_dead_records()
            lasting = self.device.used_bytes() - residency.mover.resident_bytes
            residency.grow_reserve_to(lasting)
            if step:
                residency.set_reserve(max(lasting, self.least_bytes + residency.kept_bytes))

    def begin_kernel_measure(self, program: Program, index: int, told_bytes: int) -> None:
        """Begin to measure the workspace of the kernel after this slot. `told_bytes` is the number of bytes
        that the program holds beside known tensors."""
        device, mover = self.device, self.residency.mover
        if device.sees_pages:
            return
        self.residency.forget_dead_records(self.residency.mortal)
        if device.counts_all:
            self.known_bytes = mover.resident_bytes + told_bytes
        else:
            if index == 0:
                self.others_bytes = mover.uncounted_bytes
            self.known_bytes = self.others_bytes + mover.device_counted_bytes + told_bytes
        device.reset_peak()

    def end_kernel_measure(self, program: Program, index: int) -> int:
        """End the measurement of this slot's kernel. Return the number of bytes by which the kernel's known
        workspace grew.

        On a GPU the kernel may still be running. Its memory was allocated at its launch, so the measurement
        is complete.
        """
        known, self.known_bytes = self.known_bytes, None
        if known is None:
            return 0
        residency, peak, kernel = self.residency, self.device.peak_bytes(), program.stops[index].kernel
        told, more = program.unseen_bytes[index], peak - known
        if self.device.counts_all:
            self._split_lasting_from_own(program, index, known, peak)
        else:
            program.note_unseen_bytes(index, filter_noise(told, more))
            peak += residency.reserve_bytes + residency.mover.foreign_bytes - self.others_bytes
            if program.unseen_bytes[index]:
                self._grow_budget_or_overrun(peak - residency.budget_bytes, kernel)
        return max(0, program.unseen_bytes[index] - told)

    def _split_lasting_from_own(self, program: Program, index: int, known: int, peak: int) -> None:
        """Divide the measured bytes in two. Lasting workspace is still allocated after the kernel. The
        kernel's own workspace is freed by then."""
        residency = self.residency
        grown = peak - known > residency.reserve_bytes and residency.grow_reserve_to(
            self.device.used_bytes() - known
        )
        own = filter_noise(program.unseen_bytes[index], peak - known - residency.reserve_bytes, 1)
        first = program.tried_bytes[index] is None
        program.note_tried_bytes(index, own if first else 0)
        if not first:
            program.note_unseen_bytes(index, own)
        if (own or grown) and not (first and residency.elastic):
            self._grow_budget_or_overrun(peak - residency.budget_bytes, program.stops[index].kernel)

    def make_room_for_kernel(
        self, program: Program, index: int, live_bytes: int, tick: int | None, measured: bool = False
    ) -> int:
        """Make room for a kernel with measured workspace. `live_bytes` is the number of bytes that the kernel
        and its program need beside known tensors. Return the number of bytes that are missing.

        If the step is measured, also make room for the buffer of an autotuner.
        """
        tried = self._autotuning_bytes(program, index) if measured else 0
        if not (program.unseen_bytes[index] or tried):
            return 0
        residency = self.residency
        short, _ = residency.evict_until_fits(live_bytes + tried, tick)
        short = self._grow_budget_or_overrun(max(0, short - tried), program.stops[index].kernel)
        residency.note_peak(live_bytes)
        return short

    def _autotuning_bytes(self, program: Program, index: int) -> int:
        """Return the number of bytes that the kernel's next run may take to try variants of the kernel.

        Before the first measured run, this is an estimate of the device. Before the second one, it is the
        number of bytes that the first run freed. Later it is 0.
        """
        if not self.device.counts_all:
            return 0
        tried = program.tried_bytes[index]
        return self.device.autotuning_bytes(program.stops[index].kernel) if tried is None else tried

    def _grow_budget_or_overrun(self, short: int, kernel: str) -> int:
        """Report missing bytes as an overrun, and return their number. If the budget is elastic, let it grow
        by the missing bytes instead, and return 0."""
        if short <= 0:
            return 0
        self.residency.report_overrun(short, "for itself", f"kernel {kernel}")
        return 0 if self.residency.elastic else short

    def abandon_kernel_measure(self) -> None:
        """Forget the measurement, because an exception ended the program."""
        self.known_bytes = None
