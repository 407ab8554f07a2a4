"""Slots of a program whose graph has the plan's moves in it (passes/fx/materialize.py): each part of a slot,
and each move, is a call of its own. The table is not asked for any of its ticks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from teraio.errors import StoreError

from ..ledger.record import State
from ..step.plan_follower import SlotPosition
from ..step.plan_table import EVICT, FETCH, FREE
from ..step.program import Program
from . import engine as _engine


class ExplicitMoves:
    """For one call of the step. Between `take_in` and `ensure` it has a slot open."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.open: _engine.OpenSlot | None = None
        self.here: SlotPosition | None = None
        self.live_bytes = 0

    def slot(self, index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        self.take_in(index, tensors, live_bytes)
        self.ensure(index)

    def take_in(self, index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        engine = _engine.ENGINE
        if engine is None:
            return
        self.live_bytes = self.program.unmovable_bytes_at_slot(index, live_bytes)
        if engine.mover.recorder is not None:
            engine.mover.recorder.note_slot_begin(self.live_bytes)
        engine.mover.counts.slots += 1
        engine.residency.serial += 1
        self.open = engine.open_slot(self.program, index, tensors, self.live_bytes)
        for needed in self.open.required_records:
            needed.used_at = engine.residency.serial
        self.here = SlotPosition(engine.tracker.expected, self.open.tick, self.live_bytes)

    def evict(self, tensor: str, tier: str) -> None:
        self._carry_out_move(EVICT, tensor, tier)

    def drop(self, tensor: str, tier: str) -> None:
        """Written after all if it has changed: whatever a plan says, no byte is lost."""
        self._carry_out_move(FREE, tensor, tier)

    def fetch(self, tensor: str, tier: str) -> None:
        self._carry_out_move(FETCH, tensor, tier)

    def wait(self, tensor: str, move: str) -> None:
        if move == "evict":
            self._carry_out_move(FREE, tensor)  # to wherever it is being written
        elif (engine := _engine.ENGINE) is not None:
            record = engine.residency.by_name.get(tensor)
            if record is not None and record.state is State.ARRIVING:
                # A read that failed is tried again where a kernel needs it, and is an error there.
                with contextlib.suppress(StoreError):
                    engine.mover.end_fetch(record)

    def _carry_out_move(self, operation: int, tensor: str, tier: str | None = None) -> None:
        if (engine := _engine.ENGINE) is not None and self.here is not None:
            engine.follower.carry_out_operation((operation, tensor, tier), self.here)

    def ensure(self, index: int) -> None:
        engine, slot = _engine.ENGINE, self.open
        self.open = None
        if engine is None or slot is None or self.here is None:
            return
        engine.follower.begin_late_fetches(self.here)
        engine.ensure_resident(slot)
        if (recorder := engine.mover.recorder) is not None:
            recorder.in_slot = False
            recorder.note_kernel_begin(self.program.stops[index].kernel, self.live_bytes)
