"""Storages that cannot be emptied in place, because torch refuses to resize them. They belong to (1) weights
that were loaded into such storages and (2) tensors that user code shared with numpy during training.

Such a storage counts in the budget and is kept resident. The engine adopts the storage where this is safe: it
copies the bytes to memory of torch's allocator. An adopted storage can be evicted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from teraio.units import fmt_bytes, fmt_count

from .adoption import Candidate, Refused, is_resizable, make_resizable, make_resizable_unchecked
from .record import Record, State

log = logging.getLogger("teraio")


class Ledger(Protocol):
    """The part of the ledger (the list of all records) that `Unresizable` uses."""

    @property
    def records(self) -> Mapping[int, Record]:
        """Return all records, each under the key of its storage."""
        ...

    @property
    def reachable(self) -> Mapping[int, Record]:
        """Return the evictable records whose tensors user code may read or write."""
        ...

    def keep_unresizable(self, record: Record) -> object:
        """Forbid the eviction of this record, because user code has shared its storage with numpy."""
        ...

    def forbid_eviction(self, record: Record) -> object:
        """Forbid the eviction of this record."""
        ...

    def allow_eviction(self, record: Record) -> object:
        """Allow the eviction of this record."""
        ...


class Unresizable:
    """Records of storages that cannot be emptied in place, and attempts to adopt these storages. To adopt a
    storage means to copy its bytes to memory that can be emptied."""

    def __init__(self, ledger: Ledger, is_kept: Callable[[str], bool]) -> None:
        self.ledger = ledger
        self.is_kept = is_kept
        self.records: dict[int, Record] = {}  # by storage key
        self.due = False  # True: a record was added since `retry_making_evictable` last ran
        self.fresh: list[Record] = []  # added by `add_fresh`, and not yet tried
        self.ours: set[Record] = set()  # records that numpy shares, with memory of torch's allocator
        self.copied: set[str] = set()  # names of the records that became evictable before
        self.warned = False
        self.refused: dict[str, Refused] = {}  # weights that cannot be adopted, by name

    def make_resizable(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Adopt these weights where this is safe: copy their bytes to memory that can be emptied in place.
        For each weight that cannot be adopted, remember the reason."""
        done = make_resizable((name, tensor) for name, tensor in weights if not self.is_kept(name))
        self.refused.update((refused.name, refused) for refused in done.refused)
        for record in self.records.values():
            record.explain(self.why(record))
        if done.count:
            level = logging.DEBUG if self.copied else logging.INFO  # only the first message has level INFO
            what, size = fmt_count(done.count, "tensor"), fmt_bytes(done.size_bytes)
            log.log(
                level, "teraio: %s (%s) copied to memory of torch, so that they can be evicted", what, size
            )

    def add(self, record: Record) -> None:
        """Add the record of a storage that cannot be emptied in place."""
        self.records[record.key] = record
        record.explain(self.why(record))
        self.due = True

    def why(self, record: Record) -> str:
        """Return the reason why the record's storage cannot be emptied in place."""
        refused = self.refused.get(record.name)
        return refused.reason if refused else "numpy or another library was given its memory"

    def detect_and_adopt_newly_unresizable(self) -> None:
        """Find tensors that user code has shared with numpy since the last program, and forbid their
        eviction. Then make each tensor evictable again whose numpy arrays are freed. Otherwise the next
        program might not fit in the budget."""
        for record in list(self.ledger.reachable.values()):
            storage = record.storage()
            if storage is not None and record.state is State.RESIDENT and not is_resizable(storage):
                if record.handed_out:
                    self.ledger.forbid_eviction(record)
                else:
                    self.ledger.keep_unresizable(record)
        self.make_newly_unresizable_evictable()

    def add_fresh(self, record: Record) -> None:
        """Add the record of a storage that user code has just shared with numpy."""
        self.add(record)
        self.fresh.append(record)
        self.ours.add(record)

    def make_newly_unresizable_evictable(self) -> bool:
        """Try to make records evictable again that were added by `add_fresh` since the last call. A record
        becomes evictable if the numpy arrays of its storage are freed. Return whether any record became
        evictable.

        Try all records in one search for users of their memory, because each search visits every Python
        object of the process.
        """
        fresh, self.fresh = [r for r in self.fresh if self.records.get(r.key) is r], []
        return bool(fresh and self._make_evictable(fresh))

    def retry_making_evictable(self) -> list[Record]:
        """Try again to make all records evictable, if a record was added since the last such attempt. The
        engine calls this method at the end of an optimizer's step, when no program uses the weights. Return
        the records that became evictable."""
        known = self.ledger.records
        self.records = {key: record for key, record in self.records.items() if known.get(key) is record}
        self.ours.intersection_update(self.records.values())
        if not self.due:
            return []
        self.due = False
        return self._make_evictable([*self.records.values()])

    def _make_evictable(self, records: list[Record]) -> list[Record]:
        """Adopt the storages of these records where this is safe. Return the records that became
        evictable."""
        # For a record in `ours`, the storage's use count shows whether unknown users of its memory exist.
        # Each numpy array, DLPack export or slice of the storage raises this count. So no search is needed.
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
            self.ledger.allow_eviction(record)
            del self.records[record.key]
            self.ours.discard(record)
            if record.name in self.copied and not self.warned:
                self.warned = True
                log.warning(
                    "teraio: %s was exported to numpy again; each export costs a copy of %s. Export a clone, "
                    "or compute with torch",
                    record.name,
                    fmt_bytes(record.size_bytes),
                )
            self.copied.add(record.name)
        return free
