"""One record per storage that the engine knows. Bytes move; the tensor objects stay as they are.

    DEVICE --begin_evict--> LEAVING --end_evict--> AWAY --begin_fetch--> ARRIVING --end_fetch--> DEVICE

A record holds its storage weakly: the weak count keeps the address from being used again, and the bytes still
go with the last tensor. It holds it strongly only while a copy is in flight.
"""

from __future__ import annotations

from enum import Enum
from typing import Any
from weakref import ReferenceType

import torch

from ..device.pending_transfer import Pending
from ..store.source_files import FileCopy
from ..store.space import Extent


def _measure_use_counts() -> tuple[int, int]:
    """What a storage's count says of its one tensor, once Python has seen the storage and let go of it, and
    how much more it says while Python holds it: torch 2.13 keeps the object, older ones may not."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    key = storage._cdata
    held = int(torch._C._storage_Use_Count(key))
    del storage
    kept = int(torch._C._storage_Use_Count(key))
    return kept - 1, held - kept


KEPT, HOLDS = _measure_use_counts()


def count_sharing_tensors(key: int) -> int:
    """How many tensors share a storage that Python has seen and does not hold."""
    return int(torch._C._storage_Use_Count(key)) - KEPT


class State(Enum):
    DEVICE = "device"
    LEAVING = "leaving"
    AWAY = "away"
    ARRIVING = "arriving"


DEVICE = State.DEVICE  # the hot path looks at nothing else
HOST, SSD = "host", "ssd"  # the tiers where a record can be away


class Record:
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
        self.weak: Any = storage._weak_ref()  # an address, whatever the stub says; None: released
        self.key: int = storage._cdata
        self.size_bytes = storage.nbytes()
        self.name = name
        self.kind = kind
        self.evictable = evictable
        self.because = ""  # why it cannot be evicted, if its kind does not say it
        self.foreign = False  # its bytes are not from the allocator that the device counts by
        self.persistent = False
        self.state = State.DEVICE
        self.clean = False  # its copy holds the bytes of now
        # Where its copy is: at most one of these three.
        self.place: Any = None  # in host memory, of the engine's `Host`
        self.extent: Extent | None = None
        self.source: FileCopy | None = None  # a file that has the bytes, until they change
        self.pending: Pending | None = None  # a copy in flight; holds the storage
        self.pins = 0  # of user code; a slot pins by `used_at`
        self.used_at = 0  # the last slot that touched it, counted from the start
        self.faces: list[ReferenceType[torch.Tensor]] = []  # tensors by which user code reaches a weight
        self.addressed = False  # others have its address for good
        self.handed_out = False  # a result: whoever has taken its address was seen

    @property
    def copy_tier(self) -> str | None:
        """The tier where its copy is, if it has one."""
        if self.place is not None:
            return HOST
        return None if self.extent is None and self.source is None else SSD

    def is_dead(self) -> bool:
        return self.weak is None or bool(torch.UntypedStorage._expired(self.weak))

    def storage(self) -> torch.UntypedStorage | None:
        if self.weak is None:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return storage

    def live_known_tensors(self) -> list[torch.Tensor]:
        return [tensor for face in self.faces if (tensor := face()) is not None]

    def count_sharing_tensors(self) -> int:
        """How many tensors share the bytes. A storage object that someone holds does not count: torch makes
        one and keeps it."""
        return count_sharing_tensors(self.key) - (HOLDS if self.pending is not None else 0)

    def is_shared_by_unknown_tensors(self) -> bool:
        """By tensors that are none of its faces."""
        return self.count_sharing_tensors() > len(self.live_known_tensors())

    def release_weak_reference(self) -> None:
        """A tensor that has got another storage may still lead here."""
        weak, self.weak = self.weak, None
        torch.UntypedStorage._free_weak_ref(weak)
