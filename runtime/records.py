"""One record per storage that the engine knows. Bytes move; the tensor objects stay as they are.

    DEVICE --begin_evict--> LEAVING --end_evict--> AWAY --begin_fetch--> ARRIVING --end_fetch--> DEVICE

A record holds its storage weakly: the weak count keeps the address from being used again, and the bytes still
go with the last tensor. It holds it strongly only while a copy is in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any
from weakref import ReferenceType

import torch
from torch._functorch.aot_autograd import aot_function

from .device import Pending
from .edges import Edge, Edges, alive, end_of_graphs
from .store import Extent
from .weight_files import FileCopy


def _storage_counts() -> tuple[int, int]:
    """What a storage's count says of its one tensor, once Python has seen the storage and let go of it, and
    how much more it says while Python holds it: torch 2.13 keeps the object, older ones may not."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    key = storage._cdata
    held = int(torch._C._storage_Use_Count(key))
    del storage
    kept = int(torch._C._storage_Use_Count(key))
    return kept - 1, held - kept


KEPT, HOLDS = _storage_counts()


def sharers(key: int) -> int:
    """How many tensors share a storage that Python has seen and does not hold."""
    return int(torch._C._storage_Use_Count(key)) - KEPT


@cache
@torch.inference_mode(False)
@torch.enable_grad()
def handed_over_by() -> int:
    """Return how many holders a weight has at a program's first slot if nobody but the call has it.

    Tried on a small program, outside of Dynamo's traces: what AOTAutograd holds differs by version."""
    found: list[int] = []

    def compiled(graph: torch.fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        def run(arguments: list[Any]) -> Any:
            end = end_of_graphs(arguments[0])
            found.append(arguments[0]._use_count() - 1 - (end is not None))
            return graph(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    probe = aot_function(lambda weight: weight * 2, fw_compiler=compiled, bw_compiler=lambda graph, _: graph)  # type: ignore[arg-type]
    probe(torch.nn.Parameter(torch.ones(4)))
    return found[0]


class State(Enum):
    DEVICE = "device"
    LEAVING = "leaving"
    AWAY = "away"
    ARRIVING = "arriving"


_WRITTEN = itertools.count(2**40)

DEVICE = State.DEVICE  # the hot path looks at nothing else
HOST, SSD = "host", "ssd"  # the tiers where a record can be away


class Record:
    __slots__ = (
        "addressed",
        "aliased",
        "because",
        "clean",
        "echoes",
        "edges",
        "edges_unseen",
        "evictable",
        "extent",
        "faces",
        "foreign",
        "guardable",
        "held",
        "key",
        "kind",
        "name",
        "own_holders",
        "pending",
        "persistent",
        "pins",
        "place",
        "pointed",
        "size_bytes",
        "source",
        "state",
        "used_at",
        "version",
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
        self.echoes: list[ReferenceType[torch.Tensor]] = []  # made by `detach`: they share a face's version
        self.guardable = True  # all of them can wear the guard class
        self.aliased = False  # tensors that are no faces shared the bytes when user code last touched it
        self.held = False  # C++ held one of them when user code last touched it
        self.own_holders = 0  # that are no one's business: a parameter holds its gradient
        # Eager code has it in a graph: autograd may add up gradients of it unseen.
        self.edges: list[ReferenceType[Edge]] = []
        self.edges_unseen = False  # perhaps: it was not seen
        self.pointed = False  # user code asked for its address in this step
        self.addressed = False  # others have its address for good
        self.version = 0  # of its faces, when the copy was made that `clean` speaks of

    @property
    def home(self) -> str | None:
        """The tier where its copy is, if it has one."""
        if self.place is not None:
            return HOST
        return None if self.extent is None and self.source is None else SSD

    def dead(self) -> bool:
        return self.weak is None or bool(torch.UntypedStorage._expired(self.weak))

    def storage(self) -> torch.UntypedStorage | None:
        if self.weak is None:
            return None
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.weak)
        return storage

    def live_faces(self) -> list[torch.Tensor]:
        return [tensor for face in (*self.faces, *self.echoes) if (tensor := face()) is not None]

    def versions(self) -> int:
        """Grows with every write that torch knows of. It knows of none into what was made in inference mode:
        that may have been written at any time."""
        faces = [tensor for face in self.faces if (tensor := face()) is not None]
        try:
            return sum(tensor._version for tensor in faces or self.live_faces())
        except RuntimeError:
            return next(_WRITTEN)

    def references(self) -> int:
        """How many tensors share the bytes. A storage object that someone holds does not count: torch makes
        one and keeps it."""
        return sharers(self.key) - (HOLDS if self.pending is not None else 0)

    def shared(self) -> bool:
        """By tensors that are none of its faces."""
        return self.references() > len(self.live_faces())

    def holders(self) -> int:
        """How often C++ holds its tensors: autograd saved one, a function is being applied to it. A graph
        that ends at one holds it, too, and reads nothing."""
        held = 0
        for tensor in self.live_faces():
            end = end_of_graphs(tensor)
            held += tensor._use_count() - 1 - (end is not None)  # type: ignore[attr-defined]
        return held

    def watch_others(self) -> tuple[int, int]:
        """How many there are, to be compared with how many there were."""
        return self.references(), self.holders()

    def notice_others(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        """User code has used it: a tensor more that shares the bytes, a holder more?"""
        self.aliased |= after[0] > before[0]
        self.held |= after[1] > before[1]

    def notice_edges(self, edges: Edges) -> None:
        """User code has used it, and this came of it in graphs of autograd's."""
        if edges is None:
            self.edges_unseen = True
        elif edges:
            self.edges = alive(self.edges) + edges

    def in_a_graph(self) -> bool:
        """Of eager code's, as far as is known."""
        self.edges = alive(self.edges)
        return self.edges_unseen or bool(self.edges)

    def forget_others(self) -> None:
        """At a moment when nothing runs: what user code had is seen to be gone. A program's own views of its
        weights, which autograd keeps from a forward to its backward, are not told apart: they delay it."""
        if self.aliased:
            self.aliased = self.shared()
        if self.held:
            self.held = self.holders() > self.own_holders

    @property
    def exposed(self) -> bool:
        """User code may read or write the bytes unseen."""
        return self.aliased or self.held or self.pointed or not self.guardable

    def release(self) -> None:
        """A tensor that has got another storage may still lead here."""
        weak, self.weak = self.weak, None
        torch.UntypedStorage._free_weak_ref(weak)
