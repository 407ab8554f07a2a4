"""Records: one for each storage that the engine knows. A move changes the place of a storage's bytes, and
never a tensor object.

    RESIDENT --evicting--> EVICTING --evicted--> EVICTED --fetching--> FETCHING --resident--> RESIDENT
    RESIDENT --withhold--> WITHHELD --reveal--> RESIDENT

The words on the arrows are methods of Record. In the state WITHHELD the bytes are on the device, but outside
of the storage, so that the observer detects each read. A withheld record is evicted like a resident record,
and a fetch ends in the state WITHHELD if an update of the tensor is owed.

A record has a weak reference to its storage. As long as this reference exists, no other storage gets the same
address. The storage's bytes are freed with its last tensor. A record has a strong reference only while a copy
is in flight.

Invariant: only methods of Record change a record. Other files call these methods, mostly by decision of
`Residency`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol
from weakref import ReferenceType

import torch

from ..device.pending_transfer import Pending
from ..store.source_files import FileCopy
from ..store.space import Extent


def _measure_use_counts() -> tuple[int, int]:
    """Measure by how much a storage's Python object raises the storage's use count.

    Return two numbers. (1) While no Python code refers to the object, the use count is this much above the
    number of tensors. (2) While Python code refers to the object, the use count is higher by this number.

    Versions of torch differ: torch 2.13 keeps the Python object of a storage, and older versions may not.
    """
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    key = storage._cdata
    held = int(torch._C._storage_Use_Count(key))
    del storage
    kept = int(torch._C._storage_Use_Count(key))
    return kept - 1, held - kept


KEPT, HOLDS = _measure_use_counts()


def count_sharing_tensors(key: int) -> int:
    """Count the tensors of a storage.

    Call this function only if a Python object of the storage was made before, and no Python code refers to
    this object now.
    """
    return int(torch._C._storage_Use_Count(key)) - KEPT


class State(Enum):
    """The states of a record: its bytes are on the device, in flight, or only in a slower tier.

    WITHHELD: the bytes are on the device, in a block that belongs to no tensor.
    """

    RESIDENT = "resident"
    WITHHELD = "withheld"
    EVICTING = "evicting"
    EVICTED = "evicted"
    FETCHING = "fetching"


# Slots compare states with RESIDENT. Python reads a global faster than the attribute State.RESIDENT.
RESIDENT = State.RESIDENT
HOST, SSD = "host", "ssd"  # names of the tiers to which a record can be evicted


class OwedUpdate(Protocol):
    """An update of tensors that an optimizer's `step()` has put off. It runs later, with the same result."""

    def settle(self, place: str, may_evict: bool = True, name: str = "") -> None:
        """Run the update now, because the code at `place` needs one of its tensors, which has this name. If
        `may_evict` is False, evict no other tensor for it."""
        ...


class Record:
    """The record of a storage: its name and kind, the place of its bytes, and whether they may move."""

    __slots__ = (
        "addressed",
        "because",
        "block",
        "clean",
        "evictable",
        "extent",
        "faces",
        "foreign",
        "freed",
        "handed_out",
        "key",
        "kind",
        "name",
        "owed",
        "pending",
        "persistent",
        "pins",
        "place",
        "size_bytes",
        "source",
        "state",
        "used_at",
        "weak",
    )

    def __init__(self, storage: torch.UntypedStorage, name: str, kind: str, evictable: bool) -> None:
        # The address of the weak reference, although torch's type stub has another type. None after the
        # reference is released.
        self.weak: Any = storage._weak_ref()
        self.key: int = storage._cdata
        self.size_bytes = storage.nbytes()
        self.name = name
        self.kind = kind
        self.evictable = evictable
        self.because = ""  # reason why the record cannot be evicted, unless its kind is the reason
        self.foreign = False  # True: the device's own count of used bytes does not include the record's bytes
        self.persistent = kind in {"weight", "state"}  # True: the tensor outlives the step
        self.state = State.RESIDENT
        self.clean = False  # True: the copy has the same bytes, unless the observer has detected a write
        # The place of the record's copy. At most one of `place`, `extent` and `source` is set.
        self.place: Any = None  # a place in host memory, from the engine's `Host`
        self.extent: Extent | None = None
        self.source: FileCopy | None = None  # file from which a weight was loaded, until the weight changes
        self.pending: Pending | None = None  # the copy in flight, which keeps the storage alive
        # The update of this tensor that an optimizer has put off, or None. Until it runs, no code may use the
        # storage.
        self.owed: OwedUpdate | None = None
        self.block: Any = None  # the storage that has the bytes of a withheld record, otherwise None
        self.freed = False  # True: the bytes were freed without a copy
        self.pins = 0  # above 0: user code needs the record resident. A slot uses `used_at` instead.
        self.used_at = 0  # number of the last slot that used the record, counted from the engine's start
        self.faces: list[ReferenceType[torch.Tensor]] = []  # tensor objects by which user code accesses it
        self.addressed = False  # True: user code or a library has its address and will not give it up
        self.handed_out = False  # True: user code has this result; the observer detects use of its address

    # ---- bytes and their copy

    def wrote(self) -> None:
        """Record that the bytes have changed, and the copy is stale."""
        self.clean = False

    def copied(self) -> None:
        """Record that the copy has the same bytes as the storage."""
        self.clean = True

    def reserve_extent(self, extent: Extent) -> None:
        """Set the extent (a range in the store's files) for the record's copy."""
        assert self.extent is None, self.name
        self.extent = extent

    def release_extent(self) -> Extent | None:
        """Remove the extent of the record's copy, and return this extent for release."""
        extent, self.extent = self.extent, None
        return extent

    def reserve_place(self, place: Any) -> None:
        """Set the place in host memory for the record's copy. The place does not have the bytes yet."""
        assert self.place is None, self.name
        self.place, self.clean = place, False

    def release_place(self) -> Any:
        """Remove the record's place in host memory, and return this place for release."""
        place, self.place = self.place, None
        return place

    def copied_in_file(self, source: FileCopy) -> None:
        """Record that this file has the record's bytes, so that the file is the copy."""
        self.source, self.clean = source, True

    def leave_file(self) -> None:
        """Forget the file that is the record's copy."""
        self.source = None

    # ---- state

    def evicting(self, pending: Pending | None) -> None:
        """Record that an eviction begins. `pending` is the copy in flight, or None if a clean copy exists."""
        assert self.state in {State.RESIDENT, State.WITHHELD} and self.evictable and not self.pins, self.name
        self.state, self.pending = State.EVICTING, pending

    def evicted(self) -> None:
        """Record that the eviction has ended: the storage is empty, and the copy has its bytes."""
        self.state, self.block = State.EVICTED, None

    def discarded(self) -> None:
        """Record that the bytes were freed without a copy."""
        self.evicted()
        self.freed, self.clean = True, False

    def fetching(self, pending: Pending) -> None:
        """Record that a fetch begins. `pending` is the copy in flight."""
        assert self.state is State.EVICTED, self.name
        self.state, self.pending = State.FETCHING, pending

    def fetch_failed(self) -> None:
        """Record that the fetch in flight has failed, so that the record is evicted."""
        self.state, self.pending = State.EVICTED, None

    def resident(self) -> Pending | None:
        """Set the state to RESIDENT, or to WITHHELD if a block has the bytes. Return the copy that was in
        flight, or None if there was none."""
        pending, self.pending = self.pending, None
        self.state = State.RESIDENT if self.block is None else State.WITHHELD
        return pending

    def withhold(self, block: Any) -> None:
        """Record that the bytes were moved from the storage into this block, or were fetched into it."""
        self.block = block
        if self.state is State.RESIDENT:
            self.state = State.WITHHELD

    def reveal(self) -> Any:
        """Record that the storage has its bytes again. Return the block that had them."""
        assert self.state is State.WITHHELD, self.name
        block, self.block = self.block, None
        self.state = State.RESIDENT
        return block

    def owe(self, update: OwedUpdate | None) -> None:
        """Record that this update of the tensor is put off. None: no update is put off any more."""
        self.owed = update

    # ---- use

    def pin(self) -> None:
        """Keep the record resident until `unpin` is called as often as `pin`."""
        self.pins += 1

    def unpin(self) -> None:
        """Undo one `pin`."""
        assert self.pins > 0, self.name
        self.pins -= 1

    # ---- name, kind and eviction

    def become(self, kind: str, persistent: bool) -> None:
        """Change the record's kind, because a program or an optimizer now uses the tensor as this kind."""
        self.kind, self.persistent = kind, persistent

    def persist(self) -> None:
        """Record that the tensor outlives the step."""
        self.persistent = True

    def rename(self, name: str) -> None:
        """Change the record's name."""
        self.name = name

    def resize(self, size_bytes: int) -> None:
        """Change the record's size, because user code has resized the storage."""
        self.size_bytes = size_bytes

    def change_foreign(self, foreign: bool) -> None:
        """Record whether the device's own count of used bytes does not include the record's bytes."""
        self.foreign = foreign

    def forbid_eviction(self) -> None:
        """Keep the record resident from now on."""
        self.evictable = False

    def allow_eviction(self) -> None:
        """Allow the ledger to evict the record."""
        self.evictable = True

    def explain(self, because: str) -> None:
        """Set the reason why the record cannot be evicted. Errors print this reason."""
        self.because = because

    def note_address_kept(self, because: str) -> None:
        """Record that user code or a library has the storage's address, and will not give it up."""
        self.addressed, self.because = True, because

    def hand_out(self) -> None:
        """Record that user code has this result of a program. The observer now detects whether code takes the
        result's address."""
        self.handed_out = True

    def end_hand_out(self) -> None:
        """Record that user code has taken the address of this result."""
        self.handed_out = False

    def add_face(self, face: ReferenceType[torch.Tensor]) -> None:
        """Add a tensor object by which user code accesses the storage."""
        self.faces = [*(known for known in self.faces if known() is not None), face]

    def remove_face(self, tensor: torch.Tensor) -> None:
        """Remove a tensor object, because it now has another storage."""
        self.faces = [face for face in self.faces if (other := face()) is not None and other is not tensor]

    @property
    def copy_tier(self) -> str | None:
        """Return the tier of the copy, or None if the record has no copy."""
        if self.place is not None:
            return HOST
        return None if self.extent is None and self.source is None else SSD

    @property
    def is_discarded(self) -> bool:
        """Return whether the bytes were freed without a copy, because nobody may read them again."""
        return self.freed and self.state is State.EVICTED

    def is_dead(self) -> bool:
        """Return whether the last tensor of this storage is freed."""
        return self.weak is None or bool(torch.UntypedStorage._expired(self.weak))

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if its last tensor is freed."""
        if self.weak is None:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return storage

    def live_known_tensors(self) -> list[torch.Tensor]:
        """Return the tensor objects by which user code accesses the storage, if they still exist."""
        return [tensor for face in self.faces if (tensor := face()) is not None]

    def count_sharing_tensors(self) -> int:
        """Count the tensors that share the storage. Leave out two other users: the storage's Python object,
        and a copy in flight."""
        return count_sharing_tensors(self.key) - (HOLDS if self.pending is not None else 0)

    def is_shared_by_unknown_tensors(self) -> bool:
        """Return whether the storage has more tensors than those that `live_known_tensors` returns."""
        return self.count_sharing_tensors() > len(self.live_known_tensors())

    def release_weak_reference(self) -> None:
        """Release the weak reference to the storage.

        A tensor that had this storage before may still lead to this record. So `storage()` then returns None.
        """
        weak, self.weak = self.weak, None
        torch.UntypedStorage._free_weak_ref(weak)


# ---- functions for many records, because one call for each record would make slots slow


def use_records(records: Iterable[Record], slot: int) -> None:
    """Keep these records resident while the slot with this number is the current slot."""
    for record in records:
        record.used_at = slot


def use_bound(bound: Sequence[Record | None], buffers: Iterable[int], slot: int) -> bool:
    """Keep the records of these buffers resident while the slot with this number is the current slot.

    Return whether all these records are already resident.
    """
    resident = True
    for buffer in buffers:
        if (record := bound[buffer]) is not None:
            record.used_at = slot
            resident = resident and record.state is RESIDENT
    return resident


def wrote_bound(bound: Sequence[Record | None], buffers: Iterable[int]) -> None:
    """Record that a kernel writes these buffers, and the copies of their records are stale."""
    for buffer in buffers:
        if (record := bound[buffer]) is not None:
            record.clean = False


@contextmanager
def pin_during_block(records: Iterable[Record]) -> Iterator[None]:
    """Keep these records resident during the `with` block."""
    pinned = list(records)
    for record in pinned:
        record.pin()
    try:
        yield
    finally:
        for record in pinned:
            record.unpin()
