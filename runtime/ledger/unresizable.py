"""Weights that cannot be emptied in place: those that came so, and those that user code shared with numpy in
the middle of a training. They count, they stay, and where it is safe they are adopted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from teraio.units import fmt_bytes, fmt_count

from .adoption import Candidate, Refused, is_resizable, make_resizable, make_resizable_unchecked
from .record import Record, State
from .residency import Residency

log = logging.getLogger("teraio")


class Unresizable:
    def __init__(self, residency: Residency, kept: Callable[[str], bool]) -> None:
        self.residency = residency
        self.kept = kept
        self.records: dict[int, Record] = {}  # by storage
        self.due = False  # a step's end was not given to all of them yet
        self.fresh: list[Record] = []  # of those that numpy had: nothing was tried yet
        self.ours: set[Record] = set()  # that numpy had: their bytes came from torch's own allocator
        self.copied: set[str] = set()  # of those that numpy had
        self.said = False
        self.refused: dict[str, Refused] = {}  # by the weight's name
        residency.immovable, residency.last_resort = (
            self._add_newly_unresizable,
            self.make_newly_unresizable_evictable,
        )

    def make_resizable(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        done = make_resizable((name, tensor) for name, tensor in weights if not self.kept(name))
        self.refused.update((refused.name, refused) for refused in done.refused)
        for record in self.records.values():
            record.because = self.why(record)
        if done.count:
            level = logging.DEBUG if self.copied else logging.INFO  # the first time
            what, size = fmt_count(done.count, "tensor"), fmt_bytes(done.size_bytes)
            log.log(level, "teraio: %s (%s) copied to where they can move", what, size)

    def add(self, record: Record) -> None:
        self.records[record.key] = record
        record.because = self.why(record)
        self.due = True

    def why(self, record: Record) -> str:
        refused = self.refused.get(record.name)
        return refused.reason if refused else "numpy or another library was given its memory"

    def detect_and_adopt_newly_unresizable(self) -> None:
        """User code ran: a `numpy()` of a weight, and its storage can no longer be emptied. If the array is
        gone it gets bytes that can, at once: without it the next program might not fit."""
        for record in list(self.residency.reachable.values()):
            storage = record.storage()
            if storage is not None and record.state is State.DEVICE and not is_resizable(storage):
                self.residency.forbid_eviction(record)
                if not record.handed_out:
                    self._add_newly_unresizable(record)
        self.make_newly_unresizable_evictable()

    def _add_newly_unresizable(self, record: Record) -> None:
        self.add(record)
        self.fresh.append(record)
        self.ours.add(record)

    def make_newly_unresizable_evictable(self) -> bool:
        """Whether any moves from now on. All at once: who holds them is found by looking at everything."""
        fresh, self.fresh = [r for r in self.fresh if self.records.get(r.key) is r], []
        return bool(fresh and self._make_evictable(fresh))

    def retry_making_evictable(self) -> list[Record]:
        """The step is over: what no backend saw, or what something held at that time, once more. Returns the
        weights that move from now on."""
        known = self.residency.records
        self.records = {key: record for key, record in self.records.items() if known.get(key) is record}
        self.ours.intersection_update(self.records.values())
        if not self.due:
            return []
        self.due = False
        return self._make_evictable([*self.records.values()])

    def _make_evictable(self, records: list[Record]) -> list[Record]:
        """Those of them that can be had, and move from now on."""
        # Whether others do is seen without a search: numpy, DLPack and slices of a storage hold it by tensors
        # and storages of their own.
        alone = {
            record for record in records if record in self.ours and not record.is_shared_by_unknown_tensors()
        }
        alive = [(r, s) for r in records if (s := r.storage()) is not None]
        own = [(r, s) for r, s in alive if r in alone and not is_resizable(s)]
        make_resizable_unchecked(Candidate(r.name, s, r.live_known_tensors()) for r, s in own)
        stuck = [(r.name, s) for r, s in alive if not is_resizable(s)]
        self.make_resizable([(n, torch.empty(0, device=s.device).set_(s, 0, (0,), (1,))) for n, s in stuck])
        free = [record for record, storage in alive if is_resizable(storage) and not record.addressed]
        for record in free:
            self.residency.allow_eviction(record)
            del self.records[record.key]
            self.ours.discard(record)
            if record.name in self.copied and not self.said:
                self.said = True
                log.warning(
                    "teraio: numpy had %s again: a weight that it had is copied to where it can move, each "
                    "time. Give it a clone, or ask torch for what you need",
                    record.name,
                )
            self.copied.add(record.name)
        return free
