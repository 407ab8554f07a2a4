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
from .program import Program

PATIENCE_S = 0.005
NAP_S = 20e-6


class LateFrees:
    """The wait for threads of collectives to free their tensors."""

    def __init__(self, residency: Residency, device: Device) -> None:
        self.residency = residency
        self.device = device
        self.others_bytes = 0  # bytes that the allocator counts and the engine does not know

    def are_late(self, program: Program, index: int, live_bytes: int) -> bool:
        """Return whether, at this slot, a collective that has ended has not freed its tensors."""
        return (
            self.device.collectives_free_late and self._late_bytes(program, index, live_bytes) > NOISE_BYTES
        )

    def run_slot(self, program: Program, index: int, live_bytes: int) -> None:
        """Sleep until the collectives that have ended have freed their tensors. At a program's first slot,
        note the bytes of other memory."""
        if not self.device.collectives_free_late:
            return
        if index == 0:
            self.residency.forget_dead_records()
            self.others_bytes = 0
            self.others_bytes = self._late_bytes(program, index, live_bytes)
            return
        until = time.perf_counter() + PATIENCE_S
        while (late_bytes := self._late_bytes(program, index, live_bytes)) > NOISE_BYTES:
            if time.perf_counter() > until:
                self.others_bytes += late_bytes  # other memory: do not wait for it again in this call
                return
            time.sleep(NAP_S)

    def _late_bytes(self, program: Program, index: int, live_bytes: int) -> int:
        older_bytes = program.older_bytes_at_slot(index, live_bytes)
        return self.residency.mover.uncounted_bytes - self.others_bytes - older_bytes
