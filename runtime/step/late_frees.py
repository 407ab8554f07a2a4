"""Tensors that a collective frees late.

On CPU (gloo), a thread of the process group runs a collective. A wait for the collective returns when the
thread has the result. Only then, the thread gives back its references: to arguments, to results, and to its
own copies of them. It may have to wait for a processor, or for the GIL.

    main thread    launch ........ wait returns |  next kernels
    gloo's thread         copies, communicates  |  gives back its references

Until then, the process uses more memory than the engine counts. So at each slot of a program with
collectives, the engine compares the allocator's count with its own. If the allocator counts more, the main
thread sleeps until the tensors are freed, but not longer than PATIENCE_S.
"""

from __future__ import annotations

import time

from ..device.device import Device
from ..ledger.residency import Residency
from .kernel_workspace import NOISE_BYTES

PATIENCE_S = 0.005
NAP_S = 20e-6


class LateFrees:
    """The wait for threads of collectives to free their tensors."""

    def __init__(self, residency: Residency, device: Device) -> None:
        self.residency = residency
        self.device = device
        self.others_bytes = 0  # bytes that the allocator counts and the engine does not know

    def begin_call(self, live_bytes: int) -> None:
        """Begin a call of a program with collectives. `live_bytes` is the number of bytes that the program
        holds beside known tensors."""
        if self.device.collectives_free_late:
            self.residency.forget_dead_records()
            self.others_bytes = self._uncounted_bytes(live_bytes)

    def await_frees(self, live_bytes: int) -> None:
        """Sleep until the collectives that have ended have freed their tensors."""
        if not self.device.collectives_free_late:
            return
        late_bytes = self._uncounted_bytes(live_bytes) - self.others_bytes
        if late_bytes <= NOISE_BYTES:
            return
        until = time.perf_counter() + PATIENCE_S
        while late_bytes > NOISE_BYTES and time.perf_counter() < until:
            time.sleep(NAP_S)
            late_bytes = self._uncounted_bytes(live_bytes) - self.others_bytes
        if late_bytes > NOISE_BYTES:  # other memory: do not wait for it again in this call
            self.others_bytes += late_bytes

    def _uncounted_bytes(self, live_bytes: int) -> int:
        return self.device.used_bytes() - self.residency.mover.device_counted_bytes - live_bytes
