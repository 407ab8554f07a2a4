"""Quiet calls. A quiet call is a run of a program during which no tensor has to be evicted or fetched. Every
known tensor is already resident, and there is room for all tensors that the program will make.

    first slot      arguments are registered; there is room for the most bytes that the call holds
    slots between   the tensors that kernels made are collected
    last slot       all collected tensors are registered together, slot by slot

Collected tensors are results, and tensors saved for the backward. The program holds them until it returns, so
the collection does not prolong their lives.

To register all tensors together takes a fifth of the time of a registration after each kernel. After a
kernel, the engine's data is no longer in the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from teraio import switches

from ..ledger.record import RESIDENT, Record, use_bound, wrote_bound
from ..ledger.residency import Residency
from .program import Program
from .tracker import StepTracker

Register = Callable[[Program, int, Any], Record | None]


class QuietCall:
    """The quiet call that runs, if any, and the tensors that it has made. In a quiet call, no tensor has to
    be evicted or fetched."""

    def __init__(self, residency: Residency, tracker: StepTracker, register: Register) -> None:
        self.residency, self.tracker, self.register = residency, tracker, register
        self.program: Program | None = None  # the program that runs; None outside of quiet calls
        self.at = 0  # number of the last slot that ran
        self.made: list[tuple[int, Any]] = []  # pairs (buffer, tensor that the call made for it)
        self.is_off = "quiet_calls" in switches.disabled_features()

    def begin_if_quiet(self, program: Program) -> None:
        """Begin a quiet call if no tensor has to be evicted or fetched during the call. The engine calls this
        method at the first slot of a program."""
        self.at = 0
        self.program = program if self._is_quiet(program) else None

    def _is_quiet(self, program: Program) -> bool:
        residency, tracker = self.residency, self.tracker
        if self.is_off or tracker.running is not None or tracker.base is None or tracker.expected.table:
            return False
        if residency.mover.recorder is not None or residency.torn is not None or program.schedule.symbolic:
            return False
        if program.update_slots:  # the program moves tensors out of their storages
            return False
        if any(record.state is not RESIDENT for record in residency.records.values()):
            return False
        return residency.fits(program.growth_bytes + max(program.unseen_bytes, default=0))

    def collect_made_tensors(self, index: int, tensors: Sequence[Any]) -> None:
        """Collect the tensors that the previous kernel made. The engine calls this method at each slot
        between the first and the last."""
        assert self.program is not None
        self.at = index
        for position, buffer in self.program.stops[index].made:
            self.made.append((buffer, tensors[position]))

    def register_collected_tensors(self) -> None:
        """Register the collected tensors with the engine. This happens at the last slot. It happens earlier
        if the engine's list of tensors is read during the call."""
        program, self.program = self.program, None
        if program is None:
            return
        residency, bound = self.residency, program.bound
        made, self.made = iter(self.made), []
        for index, stop in enumerate(program.stops[1 : self.at + 1], 1):
            serial = residency.advance_slot()
            for _ in stop.made:
                buffer, tensor = next(made)
                bound[buffer] = self.register(program, buffer, tensor)
            use_bound(bound, stop.needed, serial)
            wrote_bound(bound, stop.written)
            residency.note_peak(program.unmovable_bytes_at_slot(index))
        residency.mover.counts.count_slots(self.at)

    def abandon(self) -> None:
        """Forget the quiet call, because an exception ended the program."""
        self.program, self.made = None, []
