"""Slots of a program into whose graph passes/fx/materialize.py has inserted the plan's moves.

In such a graph, each half of a slot is a function call of its own, and so is each move. The engine carries
out these calls, and does not look up the plan's moves by tick.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from teraio.errors import StoreError

from ..ledger.record import State, use_records
from ..step.plan_follower import SlotPosition
from ..step.plan_table import EVICT, FETCH, FREE
from ..step.program import Program
from . import engine as _engine


class ExplicitMoves:
    """The slots and moves of one program. A slot has two halves: `take_in` and `ensure`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.open: _engine.OpenSlot | None = None
        self.position: SlotPosition | None = None
        self.live_bytes = 0

    def slot(self, index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        """Run both halves of a slot at which the plan has no moves."""
        self.take_in(index, tensors, live_bytes)
        self.ensure(index)

    def take_in(self, index: int, tensors: Sequence[Any], live_bytes: int | None = None) -> None:
        """Run the first half of a slot: register the tensors that the previous kernel made."""
        engine = _engine.ENGINE
        if engine is None:
            return
        self.live_bytes = self.program.unmovable_bytes_at_slot(index, live_bytes)
        if engine.mover.recorder is not None:
            engine.mover.recorder.note_slot_begin(self.live_bytes)
        engine.mover.counts.count_slots()
        engine.residency.advance_slot()
        self.open = engine.open_slot(self.program, index, tensors, self.live_bytes)
        use_records(self.open.required_records, engine.residency.serial)
        self.position = SlotPosition(engine.tracker.expected, self.open.tick, self.live_bytes)

    def evict(self, tensor: str, tier: str) -> None:
        self._carry_out_move(EVICT, tensor, tier)

    def drop(self, tensor: str, tier: str) -> None:
        """Evict the tensor, so that its bytes count as free from this tick on. If the bytes have changed
        since the last copy, write them to the tier first."""
        self._carry_out_move(FREE, tensor, tier)

    def fetch(self, tensor: str, tier: str) -> None:
        self._carry_out_move(FETCH, tensor, tier)

    def wait(self, tensor: str, move: str) -> None:
        """Wait for the tensor's move in flight. `move` is "evict" or "fetch"."""
        if move == "evict":
            self._carry_out_move(FREE, tensor)  # without a tier: the write in flight already has its tier
        elif (engine := _engine.ENGINE) is not None:
            record = engine.residency.by_name.get(tensor)
            if record is not None and record.state is State.FETCHING:
                # Ignore an error of this fetch. The slot of the kernel that needs the tensor fetches the
                # tensor again, and raises an error if the second fetch fails too.
                with contextlib.suppress(StoreError):
                    engine.mover.end_fetch(record)

    def _carry_out_move(self, operation: int, tensor: str, tier: str | None = None) -> None:
        if (engine := _engine.ENGINE) is not None and self.position is not None:
            engine.follower.carry_out([(operation, tensor, tier)], self.position)

    def ensure(self, index: int) -> None:
        """Run the second half of a slot: make the records resident that the next kernel needs."""
        engine, slot = _engine.ENGINE, self.open
        self.open = None
        if engine is None or slot is None or self.position is None:
            return
        engine.follower.begin_late_fetches(self.position)
        engine.ensure_resident(slot)
        if (recorder := engine.mover.recorder) is not None:
            recorder.end_slot(self.program.stops[index].kernel, self.live_bytes)
