"""Tensors whose update is owed. `step()` has returned, and the update has not run yet.

Until the update runs, no code may use these tensors. So their bytes are withheld: they are in blocks that
belong to no tensor, and the observer detects each read. Before the read, the update runs (it is settled).

    tensor with a record     Record.owed is the update; the mover withholds the bytes
    small tensor             it has no record; `small` has its update and its bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..torch_extension.observer import NotEvicted
from .mover import Mover
from .record import OwedUpdate, Record, State


@dataclass(frozen=True, slots=True)
class WithheldBytes:
    """The bytes of a small tensor, outside of the tensor's storage."""

    update: OwedUpdate
    storage: Any
    block: Any


class OwedTensors:
    """The tensors of all owed updates of one engine."""

    def __init__(self, mover: Mover, known: Callable[[Iterable[int]], list[Record]]) -> None:
        self.mover = mover
        self.known = known  # returns the records of storages
        self.small: dict[int, WithheldBytes] = {}  # by storage key

    def withhold(self, update: OwedUpdate, records: Sequence[Record], small: Iterable[Any]) -> bool:
        """Move the bytes of these records and of these small storages into blocks. If code uses one of them
        now, move none and return False."""
        done = True
        for record in records:
            self._owe(record, update)
        for record in records:
            done = done and self.mover.withhold(record)
        for storage in small:
            done = done and self._withhold_small(update, storage)
        if not done:
            self.release(records, small)
            self.reveal(records)
        return done

    def _owe(self, record: Record, update: OwedUpdate | None) -> None:
        """Record that this update of the record is owed. Until it has run, user code may not scale the
        gradient, because the update reads the gradient."""
        record.owe(update)
        if record.kind == "grad" and self.mover.device.observer is not None:
            self.mover.device.observer.set_may_owe(record.key, update is None)

    def _withhold_small(self, update: OwedUpdate, storage: Any) -> bool:
        try:
            block = self.mover.device.withhold_bytes(storage, unwritten=False)
        except NotEvicted:
            return False
        self.small[storage._cdata] = WithheldBytes(update, storage, block)
        return True

    def blocks_of(self, records: Sequence[Record], small: Iterable[Any]) -> dict[int, Any]:
        """Return the blocks that have the bytes of these records and small storages, by storage key. The
        bytes are on the device."""
        for record in records:
            if record.state is State.EVICTING and record.block is not None:
                self.mover.undo_evict(record)
        blocks = {record.key: record.block for record in records if record.block is not None}
        found = ((storage._cdata, self.small.get(storage._cdata)) for storage in small)
        return blocks | {key: withheld.block for key, withheld in found if withheld is not None}

    def release(self, records: Iterable[Record], small: Iterable[Any]) -> None:
        """Record that the update of these tensors is not owed any more. Small tensors get their bytes back.
        A withheld record gets its bytes when it is made resident."""
        observer = self.mover.device.observer
        for record in records:
            self._owe(record, None)
        for storage in small:
            if (withheld := self.small.pop(storage._cdata, None)) is not None:
                self.mover.device.return_bytes(storage, withheld.block)
                if observer is not None:
                    observer.forget_storage(storage._cdata, alive=True)

    def reveal(self, records: Iterable[Record]) -> None:
        """Give withheld bytes on the device back to their storages. The tensors may then be used."""
        for record in records:
            if record.state is State.EVICTING and record.block is not None:
                self.mover.undo_evict(record)
            if record.state is State.WITHHELD:
                self.mover.reveal(record)

    def settle_records(self, records: Iterable[Record], place: str) -> None:
        """Run the owed updates of these tensors now, because the code at `place` needs the tensors."""
        for record in records:
            if record.owed is not None:
                record.owed.settle(place, name=record.name)

    def settle_storages(self, keys: Sequence[int], place: str, may_evict: bool = True) -> None:
        """Run the owed updates of the tensors with these storage keys. If `may_evict` is False, evict no
        other tensor for them."""
        for key in keys:
            if (withheld := self.small.get(key)) is not None:
                withheld.update.settle(place, may_evict)
        for record in self.known(keys):
            if record.owed is not None:
                record.owed.settle(place, may_evict, record.name)
