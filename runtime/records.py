"""One record per storage that the engine knows. Bytes move; the tensor objects stay as they are.

    DEVICE --begin_evict--> LEAVING --end_evict--> AWAY --begin_fetch--> ARRIVING --end_fetch--> DEVICE

A record holds its storage weakly: the weak count keeps the address from being used again, and the bytes still
go with the last tensor. It holds it strongly only while a copy is in flight.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from .device import Pending
from .store import Extent


class State(Enum):
    DEVICE = "device"
    LEAVING = "leaving"
    AWAY = "away"
    ARRIVING = "arriving"


class Record:
    __slots__ = (
        "clean",
        "evictable",
        "extent",
        "key",
        "kind",
        "last_tick",
        "name",
        "pending",
        "persistent",
        "pins",
        "size_bytes",
        "state",
        "weak",
    )

    def __init__(self, storage: torch.UntypedStorage, name: str, kind: str, evictable: bool) -> None:
        self.weak: Any = storage._weak_ref()  # an address, whatever the stub says
        self.key: int = storage._cdata
        self.size_bytes = storage.nbytes()
        self.name = name
        self.kind = kind
        self.evictable = evictable
        self.persistent = False
        self.state = State.DEVICE
        self.clean = False  # the extent holds the bytes of now
        self.extent: Extent | None = None
        self.pending: Pending | None = None  # a copy in flight; holds the storage
        self.pins = 0
        self.last_tick = 0

    def dead(self) -> bool:
        return bool(torch.UntypedStorage._expired(self.weak))

    def storage(self) -> torch.UntypedStorage | None:
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return storage

    def release(self) -> None:
        torch.UntypedStorage._free_weak_ref(self.weak)
