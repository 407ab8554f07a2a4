"""One record per storage that the engine knows. Moves change the place of bytes, never a tensor object.

    RESIDENT --evicting--> EVICTING --evicted--> EVICTED --fetching--> FETCHING --resident--> RESIDENT

A record holds its storage weakly. The weak reference prevents another storage from getting the same address.
It does not keep the bytes: they are freed with the last tensor. A record holds its storage strongly only
while a copy is in flight.

Invariant: only methods of Record change a record. Other files call these methods. `Residency` decides when
they are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any
from weakref import ReferenceType

import torch

from ..device.pending_transfer import Pending
from ..store.source_files import FileCopy
from ..store.space import Extent


def _measure_use_counts() -> tuple[int, int]:
    """Measure the use count of a storage that only one tensor uses, after Python has made an object for the
    storage.

    Return two numbers: (1) the count beyond the tensor's own use while Python holds no reference to the
    object, and (2) the count that one Python reference adds. Torch 2.13 keeps the Python object of a storage.
    Older versions may not keep this object.
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

    Python must have made an object for the storage before, and must hold no reference to it now.
    """
    return int(torch._C._storage_Use_Count(key)) - KEPT


class State(Enum):
    """The places of a record's bytes: on the device, in flight, or only in a slower tier."""

    RESIDENT = "resident"
    EVICTING = "evicting"
    EVICTED = "evicted"
    FETCHING = "fetching"


# Python reads a global faster than an attribute. Slots compare states only with RESIDENT.
RESIDENT = State.RESIDENT
HOST, SSD = "host", "ssd"  # the tiers to which a record can be evicted


class Record:
    """The record of a storage: its name and kind, the place of its bytes, and whether they may move."""

    __slots__ = (
        "addressed",
        "because",
        "clean",
        "evictable",
        "extent",
        "faces",
        "foreign",
        "handed_out",
        "key",
        "kind",
        "name",
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
        # An address, although torch's type stub has another type. None after the release.
        self.weak: Any = storage._weak_ref()
        self.key: int = storage._cdata
        self.size_bytes = storage.nbytes()
        self.name = name
        self.kind = kind
        self.evictable = evictable
        self.because = ""  # why the record cannot be evicted, if its kind is not the reason
        self.foreign = False  # True: the device's own count leaves out the record's bytes
        self.persistent = kind in {"weight", "state"}  # True: the tensor outlives the step
        self.state = State.RESIDENT
        self.clean = False  # True: the copy equals the bytes, unless the observer saw a write
        # The place of the record's copy: at most one of the next three fields is set.
        self.place: Any = None  # a place in host memory, of the engine's `Host`
        self.extent: Extent | None = None
        self.source: FileCopy | None = None  # the file of a loaded weight, until the bytes change
        self.pending: Pending | None = None  # the copy in flight, which holds the storage
        self.pins = 0  # number of pins by user code; a slot uses `used_at` instead
        self.used_at = 0  # the last slot that used the record, counted from the engine's start
        self.faces: list[ReferenceType[torch.Tensor]] = []  # tensors with which user code accesses a weight
        self.addressed = False  # True: user code or a library has the address for good
        self.handed_out = False  # True: user code has this result, and the observer watches its address

    # ---- bytes and their copy

    def wrote(self) -> None:
        """Record that the bytes changed, so that the copy is stale."""
        self.clean = False

    def copied(self) -> None:
        """Record that the copy equals the record's bytes."""
        self.clean = True

    def reserve_extent(self, extent: Extent) -> None:
        """Take this extent of the store for the copy."""
        assert self.extent is None, self.name
        self.extent = extent

    def release_extent(self) -> Extent | None:
        """Give up the extent of the copy, and return it."""
        extent, self.extent = self.extent, None
        return extent

    def reserve_place(self, place: Any) -> None:
        """Take this place in host memory for the copy. The place has no copy yet."""
        assert self.place is None, self.name
        self.place, self.clean = place, False

    def release_place(self) -> Any:
        """Give up the place in host memory, and return it."""
        place, self.place = self.place, None
        return place

    def copied_in_file(self, source: FileCopy) -> None:
        """Record that this file has the record's bytes."""
        self.source, self.clean = source, True

    def leave_file(self) -> None:
        """Forget the file that had the record's bytes."""
        self.source = None

    # ---- state

    def evicting(self, pending: Pending | None) -> None:
        """Begin an eviction. `pending` is the copy in flight, or None if a clean copy exists."""
        assert self.state is State.RESIDENT and self.evictable and not self.pins, self.name
        self.state, self.pending = State.EVICTING, pending

    def evicted(self) -> None:
        """Record that the storage is empty and the copy has its bytes."""
        self.state = State.EVICTED

    def fetching(self, pending: Pending) -> None:
        """Begin a fetch, with this copy in flight."""
        assert self.state is State.EVICTED, self.name
        self.state, self.pending = State.FETCHING, pending

    def fetch_failed(self) -> None:
        """Record that the fetch in flight ended without the bytes."""
        self.state, self.pending = State.EVICTED, None

    def resident(self) -> Pending | None:
        """Record that the device has the bytes. Return the copy that was in flight, or None."""
        pending, self.pending = self.pending, None
        self.state = State.RESIDENT
        return pending

    # ---- use

    def pin(self) -> None:
        """Keep the record resident until every `pin` is undone by an `unpin`."""
        self.pins += 1

    def unpin(self) -> None:
        """Undo one `pin`."""
        assert self.pins > 0, self.name
        self.pins -= 1

    # ---- name, kind and eviction

    def become(self, kind: str, persistent: bool) -> None:
        """Change the record's kind, after a program or an optimizer has shown how it uses the tensor."""
        self.kind, self.persistent = kind, persistent

    def persist(self) -> None:
        """Record that the record's tensor outlives the step."""
        self.persistent = True

    def rename(self, name: str) -> None:
        """Change the name under which the ledger lists the record."""
        self.name = name

    def resize(self, size_bytes: int) -> None:
        """Count the storage at another size, because user code resized it."""
        self.size_bytes = size_bytes

    def change_foreign(self, foreign: bool) -> None:
        """Record whether the device's own count leaves out the record's bytes."""
        self.foreign = foreign

    def forbid_eviction(self) -> None:
        """Keep the record resident from now on."""
        self.evictable = False

    def allow_eviction(self) -> None:
        """Allow the ledger to evict the record."""
        self.evictable = True

    def explain(self, because: str) -> None:
        """Set the reason why the record cannot be evicted, which errors print."""
        self.because = because

    def note_address_kept(self, because: str) -> None:
        """Record that user code or a library has the storage's address for good."""
        self.addressed, self.because = True, because

    def hand_out(self) -> None:
        """Record that user code has this result, and that the observer detects when code takes its
        address."""
        self.handed_out = True

    def end_hand_out(self) -> None:
        """Record that user code took the address of this result."""
        self.handed_out = False

    def add_face(self, face: ReferenceType[torch.Tensor]) -> None:
        """Add a tensor with which user code accesses the storage."""
        self.faces = [*(known for known in self.faces if known() is not None), face]

    def remove_face(self, tensor: torch.Tensor) -> None:
        """Remove a tensor that no longer has this storage."""
        self.faces = [face for face in self.faces if (other := face()) is not None and other is not tensor]

    @property
    def copy_tier(self) -> str | None:
        """Return the tier of the copy, or None if the record has no copy."""
        if self.place is not None:
            return HOST
        return None if self.extent is None and self.source is None else SSD

    def is_dead(self) -> bool:
        """Return whether the last tensor of this storage has died."""
        return self.weak is None or bool(torch.UntypedStorage._expired(self.weak))

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if its last tensor has died."""
        if self.weak is None:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return storage

    def live_known_tensors(self) -> list[torch.Tensor]:
        """Return the living tensors with which user code accesses the storage."""
        return [tensor for face in self.faces if (tensor := face()) is not None]

    def count_sharing_tensors(self) -> int:
        """Count the tensors that share the bytes. Do not count the storage object that torch keeps, or a copy
        in flight."""
        return count_sharing_tensors(self.key) - (HOLDS if self.pending is not None else 0)

    def is_shared_by_unknown_tensors(self) -> bool:
        """Return whether tensors other than the known tensors share the bytes."""
        return self.count_sharing_tensors() > len(self.live_known_tensors())

    def release_weak_reference(self) -> None:
        """Release the weak reference to the storage.

        A tensor that has another storage now may still lead to this record, whose `storage()` then returns
        None.
        """
        weak, self.weak = self.weak, None
        torch.UntypedStorage._free_weak_ref(weak)


# ---- many records per call, because a slot has no time for a call per record


def use_records(records: Iterable[Record], slot: int) -> None:
    """Keep these records resident in this slot."""
    for record in records:
        record.used_at = slot


def use_bound(bound: Sequence[Record | None], buffers: Iterable[int], slot: int) -> bool:
    """Keep the records of these buffers resident in this slot. Return whether all of them are resident."""
    resident = True
    for buffer in buffers:
        if (record := bound[buffer]) is not None:
            record.used_at = slot
            resident = resident and record.state is RESIDENT
    return resident


def wrote_bound(bound: Sequence[Record | None], buffers: Iterable[int]) -> None:
    """Record that a kernel wrote these buffers, so that their copies are stale."""
    for buffer in buffers:
        if (record := bound[buffer]) is not None:
            record.clean = False


@contextmanager
def pin_during_block(records: Iterable[Record]) -> Iterator[None]:
    """Keep these records resident during the block."""
    pinned = list(records)
    for record in pinned:
        record.pin()
    try:
        yield
    finally:
        for record in pinned:
            record.unpin()
