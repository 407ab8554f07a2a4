"""Weights that cannot be emptied in place: those that came so, and those that user code shared with numpy in
the middle of a training. They count, they stay, and where it is safe they are adopted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from teraio.units import fmt_bytes

from .adopt import Refused, adopt, movable
from .records import Record, State
from .residency import Residency

log = logging.getLogger("teraio")


class Stuck:
    def __init__(self, residency: Residency, kept: Callable[[str], bool]) -> None:
        self.residency = residency
        self.kept = kept
        self.records: dict[int, Record] = {}  # by storage
        self.asked_again: set[str] = set()  # those of them that a step's end was given to
        self.refused: dict[str, Refused] = {}  # by the weight's name
        residency.immovable = self._note

    def adopt(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        done = adopt((name, tensor) for name, tensor in weights if not self.kept(name))
        self.refused.update((refused.name, refused) for refused in done.refused)
        if done.count:
            size = fmt_bytes(done.size_bytes)
            log.info("teraio: %d weights (%s) copied to where they can move", done.count, size)

    def look(self) -> None:
        """User code ran: a `numpy()` of a weight, and its storage can no longer be emptied."""
        for record in list(self.residency.reachable.values()):
            storage = record.storage()
            if storage is not None and record.state is State.DEVICE and not movable(storage):
                self.residency.settle(record)
                self._note(record)

    def add(self, record: Record) -> None:
        self.records[record.key] = record

    def why(self, record: Record) -> str:
        refused = self.refused.get(record.name)
        return refused.reason if refused else "numpy or another library was given its memory"

    def _note(self, record: Record) -> None:
        self.add(record)
        if record.name in self.asked_again:
            log.warning("teraio: %s stays in memory from now on: numpy had it again", record.name)

    def retry(self) -> list[Record]:
        """The step is over: what no backend saw, or what something held at that time, once more. Returns the
        weights that move from now on."""
        known = self.residency.records
        stuck = [(r, s) for r in self.records.values() if known.get(r.key) is r and (s := r.storage())]
        names = {record.name for record, _ in stuck}
        if names - self.asked_again:
            self.adopt([(r.name, torch.empty(0, device=s.device).set_(s, 0, (0,), (1,))) for r, s in stuck])
        free = [record for record, storage in stuck if movable(storage) and not record.addressed]
        for record in free:
            self.residency.unsettle(record)
        self.records = {record.key: record for record, storage in stuck if not movable(storage)}
        self.asked_again |= names
        return free
