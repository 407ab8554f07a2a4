"""Calls in which nothing has to move: all is there, and what the program will make fits beside it.

    first slot      arguments are known; nothing is away, and there is room for the most that the call holds
    slots between   put down what was made, and return
    last slot       all of it is counted at once, slot by slot, as it would have been

What is put down are results and saved tensors, which the program holds until it returns: nothing lives longer
for it. Python that runs once per kernel finds cold caches; run in one go it takes a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from teraio import switches

from ..ledger.record import DEVICE, Record
from ..ledger.residency import Residency
from .program import Program
from .tracker import StepTracker

Register = Callable[[Program, int, Any], Record | None]


class QuietCall:
    def __init__(self, residency: Residency, tracker: StepTracker, register: Register) -> None:
        self.residency, self.tracker, self.register = residency, tracker, register
        self.program: Program | None = None  # whose call this is, if it is a calm one
        self.at = 0  # the last slot that it was at
        self.made: list[tuple[int, Any]] = []  # buffers, and the tensors that they are
        self.is_off = "quiet_calls" in switches.disabled_features()

    def begin_if_quiet(self, program: Program) -> None:
        """At the first slot: nothing of the call before is left to count."""
        self.at = 0
        self.program = program if self._is_calm(program) else None

    def _is_calm(self, program: Program) -> bool:
        residency, tracker = self.residency, self.tracker
        if self.is_off or tracker.running is not None or tracker.base is None or tracker.expected.table:
            return False
        if residency.mover.recorder is not None or residency.torn is not None or program.schedule.symbolic:
            return False
        if any(record.state is not DEVICE for record in residency.records.values()):
            return False
        return residency.fits(program.growth_bytes + max(program.unseen_bytes, default=0))

    def collect_made_tensors(self, index: int, tensors: Sequence[Any]) -> None:
        """A slot of this call, neither the first nor the last."""
        assert self.program is not None
        self.at = index
        for position, buffer in self.program.stops[index].made:
            self.made.append((buffer, tensors[position]))

    def register_collected_tensors(self) -> None:
        """What was put down is counted: the last slot comes, or another program's first."""
        program, self.program = self.program, None
        if program is None:
            return
        residency, mover, bound = self.residency, self.residency.mover, program.bound
        made, self.made = iter(self.made), []
        for index, stop in enumerate(program.stops[1 : self.at + 1], 1):
            serial = residency.serial = residency.serial + 1
            for _ in stop.made:
                buffer, tensor = next(made)
                bound[buffer] = self.register(program, buffer, tensor)
            for buffer in stop.needed:
                if (record := bound[buffer]) is not None:
                    record.used_at = serial
            residency.mark_written(bound, stop.written)
            total_bytes = mover.resident_bytes + program.unmovable_bytes_at_slot(index)
            mover.counts.peak_bytes = max(mover.counts.peak_bytes, total_bytes)
        mover.counts.slots += self.at

    def abandon(self) -> None:
        """The call ended with an exception, and what it made with it."""
        self.program, self.made = None, []
