"""Storages that cannot be emptied in place. They belong to (1) weights that were loaded into such storages
and (2) weights that user code shared with numpy during training.

These storages count in the budget and are kept resident. Where this is safe, `adoption` copies their bytes to
memory of torch's allocator. After that, the ledger can evict these storages like all others.
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
    """The fields and methods of the ledger that `Unresizable` uses."""

    @property
    def records(self) -> Mapping[int, Record]:
        """Return all records, by storage key."""
        ...

    @property
    def reachable(self) -> Mapping[int, Record]:
        """Return the evictable records that user code may touch."""
        ...

    def keep_unresizable(self, record: Record) -> object:
        """Keep a record resident because numpy shares its storage."""
        ...

    def forbid_eviction(self, record: Record) -> object:
        """Keep a record resident from now on."""
        ...

    def allow_eviction(self, record: Record) -> object:
        """Allow the ledger to evict a record."""
        ...


class Unresizable:
    """Records that cannot be emptied in place, and the attempts to adopt them."""

    def __init__(self, ledger: Ledger, is_kept: Callable[[str], bool]) -> None:
        self.ledger = ledger
        self.is_kept = is_kept
        self.records: dict[int, Record] = {}  # by storage key
        self.due = False  # True: a record was added since the last retry
        self.fresh: list[Record] = []  # records shared with numpy whose adoption has not been tried yet
        self.ours: set[Record] = set()  # records shared with numpy, with bytes of torch's allocator
        self.copied: set[str] = set()  # names of records that were adopted before
        self.warned = False
        self.refused: dict[str, Refused] = {}  # refusals by the weight's name

    def make_resizable(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Adopt these weights where this is safe. For each refused weight, keep the reason."""
        done = make_resizable((name, tensor) for name, tensor in weights if not self.is_kept(name))
        self.refused.update((refused.name, refused) for refused in done.refused)
        for record in self.records.values():
            record.explain(self.why(record))
        if done.count:
            level = logging.DEBUG if self.copied else logging.INFO  # INFO for the first adoption only
            what, size = fmt_count(done.count, "tensor"), fmt_bytes(done.size_bytes)
            log.log(
                level, "teraio: %s (%s) copied to memory of torch, so that they can be evicted", what, size
            )

    def add(self, record: Record) -> None:
        """Add a record whose storage cannot be emptied in place."""
        self.records[record.key] = record
        record.explain(self.why(record))
        self.due = True

    def why(self, record: Record) -> str:
        """Return why the record cannot be emptied in place."""
        refused = self.refused.get(record.name)
        return refused.reason if refused else "numpy or another library was given its memory"

    def detect_and_adopt_newly_unresizable(self) -> None:
        """Find weights that user code has shared with numpy since the last program. Adopt the weights whose
        numpy arrays have died. Without this, the next program might not fit in the budget."""
        for record in list(self.ledger.reachable.values()):
            storage = record.storage()
            if storage is not None and record.state is State.RESIDENT and not is_resizable(storage):
                if record.handed_out:
                    self.ledger.forbid_eviction(record)
                else:
                    self.ledger.keep_unresizable(record)
        self.make_newly_unresizable_evictable()

    def add_fresh(self, record: Record) -> None:
        """Add a record whose storage user code has just shared with numpy."""
        self.add(record)
        self.fresh.append(record)
        self.ours.add(record)

    def make_newly_unresizable_evictable(self) -> bool:
        """Adopt records that were shared with numpy and whose numpy arrays have died. Return whether any
        record became evictable.

        All records are tried together, because every search for holders looks at each object of the process.
        """
        fresh, self.fresh = [r for r in self.fresh if self.records.get(r.key) is r], []
        return bool(fresh and self._make_evictable(fresh))

    def retry_making_evictable(self) -> list[Record]:
        """Retry adoption at the end of a step, for (1) weights that no backend saw and (2) weights that had
        unknown holders before. Return the weights that became evictable."""
        known = self.ledger.records
        self.records = {key: record for key, record in self.records.items() if known.get(key) is record}
        self.ours.intersection_update(self.records.values())
        if not self.due:
            return []
        self.due = False
        return self._make_evictable([*self.records.values()])

    def _make_evictable(self, records: list[Record]) -> list[Record]:
        """Adopt the records that can be adopted. Return the records that became evictable."""
        # The storage's use count shows other holders without a search. Such holders are tensors and storages
        # that numpy, DLPack or a slice of the storage has made.
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
