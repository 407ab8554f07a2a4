"""Quiet calls. In a quiet call, every record is already resident, and there is room for all tensors that the
program will make. So no record has to move.

    first slot      arguments are registered; there is room for the most bytes that the call holds
    slots between   the tensors that kernels made are collected
    last slot       all collected tensors are registered together, slot by slot

Collected tensors are results and saved tensors. The program holds them until it returns, so the collection
does not prolong their lives. Registration of all tensors together takes a fifth of the time of a registration
after each kernel, where the CPU's caches are cold.
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
    """The quiet call that runs, if any, and the tensors that it has made."""

    def __init__(self, residency: Residency, tracker: StepTracker, register: Register) -> None:
        self.residency, self.tracker, self.register = residency, tracker, register
        self.program: Program | None = None  # the program of the quiet call
        self.at = 0  # the last slot that ran
        self.made: list[tuple[int, Any]] = []  # buffers, and the tensors made for them
        self.is_off = "quiet_calls" in switches.disabled_features()

    def begin_if_quiet(self, program: Program) -> None:
        """Begin a quiet call if no record has to move during the call. A program's first slot calls this
        method."""
        self.at = 0
        self.program = program if self._is_quiet(program) else None

    def _is_quiet(self, program: Program) -> bool:
        residency, tracker = self.residency, self.tracker
        if self.is_off or tracker.running is not None or tracker.base is None or tracker.expected.table:
            return False
        if residency.mover.recorder is not None or residency.torn is not None or program.schedule.symbolic:
            return False
        if any(record.state is not RESIDENT for record in residency.records.values()):
            return False
        return residency.fits(program.growth_bytes + max(program.unseen_bytes, default=0))

    def collect_made_tensors(self, index: int, tensors: Sequence[Any]) -> None:
        """Collect the tensors that the previous kernel made. Slots between the first and the last slot call
        this method."""
        assert self.program is not None
        self.at = index
        for position, buffer in self.program.stops[index].made:
            self.made.append((buffer, tensors[position]))

    def register_collected_tensors(self) -> None:
        """Register the collected tensors. This happens at the last slot, or earlier if the ledger is read
        during the call."""
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
        """Forget the quiet call, because an exception ended it."""
        self.program, self.made = None, []
