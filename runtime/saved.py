"""What eager autograd saved of a weight comes back when it is read, and may be away until then.

    user code calls a function     nodes of autograd's keep the weight, or views of it, for the backward
    before such a node runs        a hook of it: the bytes come back
    after it has run               a hook of it: they may leave again

That is enough only if these nodes account for everything that the call left holding the weight: its tensors'
holders in C++, and other tensors of its bytes. If they do not, someone may read the bytes unseen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._dynamo.eval_frame import skip_code

from .edges import Call, tensors_of
from .guard import Guard, active, nobody_brings

if TYPE_CHECKING:
    from .records import Record

NODES_MAX = 64  # of one call: a function of torch makes a few
ENDS = 2**64 - 1  # the number of a node at which graphs of a weight end
WRAPPED = 1  # an object of Python's holds its tensor once

Kept = tuple[Any, torch.Tensor]  # a node, and one of the tensors that it saved

NAMES: dict[type, tuple[str, ...]] = {}  # of a kind of nodes: attributes that may hold tensors


class Reader:
    """Two hooks of a node that saved a weight, or a view of it. A node that fails ends without its second
    one."""

    __slots__ = ("face", "open", "place", "record")

    def __init__(self, record: Record, saved: torch.Tensor) -> None:
        self.record = record
        # A weight may have been given other bytes since, and they are what is read.
        own = any(saved is face for face in record.live_faces())
        self.face = ref(saved) if own else None
        self.place = ""
        self.open: tuple[Guard, Record, Any] | None = None

    def hook(self, node: Any) -> None:
        self.place = node.name()
        node.register_prehook(self.begins)
        node.register_hook(self.ends)

    def begins(self, *_: Any) -> None:
        self.ends()
        face = self.face() if self.face is not None else None
        guard = active()
        if guard is None:
            if (storage := self.record.storage()) is not None and not storage.nbytes():
                raise nobody_brings(self.record.name, self.place)
            return
        record = guard.owner.record_at(self.record.key) if face is None else guard.records.get(id(face))
        if record is None or record.dead():
            return
        try:
            self.open = guard, record, guard.owner.open([record], self.place)
        except BaseException:
            record.pins -= 1
            raise

    def ends(self, *_: Any) -> None:
        opened, self.open = self.open, None
        if opened is not None:
            guard, record, before = opened
            guard.owner.close([record], "", before)

    def __del__(self) -> None:
        self.ends()


for _method in (Reader.begins, Reader.ends, Reader.__del__):
    skip_code(_method.__code__)  # a graph may end while Dynamo looks at what runs


def left_to_nodes(record: Record, before: tuple[int, int], call: Call) -> bool:
    """Whether nodes of this call keep all that came to hold the record. They have hooks from then on."""
    kept = _kept(record, before, call)
    for node, tensor in kept or ():
        Reader(record, tensor).hook(node)
    return kept is not None


def _kept(record: Record, before: tuple[int, int], call: Call) -> list[Kept] | None:
    """What nodes of this call saved of the record; None: someone else holds it, perhaps. What a hook of the
    user's makes of it when it is saved is not looked at: that would undo it."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or _compiled():
        return None
    with DisableTorchFunctionSubclass():
        made = tensors_of(call)
        if made is None or any(_shares(tensor, record) for tensor in made):
            return None
        nodes = _nodes([tensor.grad_fn for tensor in made], call.first)
        if nodes is None:
            return None
        kept = [(node, tensor) for node in nodes for tensor in _saved_by(node) if _shares(tensor, record)]
        tensors, holders = record.watch_others()
        return kept if _accounted(record, kept) == (tensors - before[0], holders - before[1]) else None


def _accounted(record: Record, kept: list[Kept]) -> tuple[int, int] | None:
    """How many tensors share the bytes because of these nodes, and how many holders the record's own have.
    None: what was saved has others, too."""
    faces = {id(face) for face in record.live_faces()}
    times = Counter(id(tensor) for _, tensor in kept)
    holders = sum(times[face] for face in faces)
    views = times.keys() - faces
    for view in views:
        at = next(at for at in range(len(kept)) if id(kept[at][1]) == view)
        if _objects(kept, at) != ALONE + times[view] - 1 or _uses(kept, at) != times[view] + WRAPPED:
            return None
        holders += id(kept[at][1]._base) in faces
    return len(views), holders


def _objects(kept: list[Kept], at: int) -> int:
    return sys.getrefcount(kept[at][1])


def _uses(kept: list[Kept], at: int) -> int:
    return int(kept[at][1]._use_count())  # type: ignore[attr-defined]


@torch.inference_mode(False)
@torch.enable_grad()
def _objects_alone() -> int:
    """For a view that a node alone has: the looking itself, and what torch adds, which differs by version."""
    end = torch.ones(1, 1, requires_grad=True) @ torch.ones(1, 1).t()
    return _objects([(end.grad_fn, tensor) for tensor in _saved_by(end.grad_fn)], 0)


def _nodes(roots: list[Any], first: int) -> list[Any] | None:
    """Those that this call made."""
    found: dict[int, Any] = {}
    left = roots
    while left:
        node = left.pop()
        if node is None or id(node) in found or not first <= node._sequence_nr() < ENDS:
            continue
        found[id(node)] = node
        if len(found) > NODES_MAX:
            return None
        left += [target for target, _ in node.next_functions]
    return list(found.values())


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """A function of the user's, written in Python, does not tell: what it keeps is not accounted for."""
    kind = type(node)
    if kind not in NAMES:
        NAMES[kind] = tuple(name for name in dir(kind) if name.startswith("_saved_"))
    for name in NAMES[kind]:
        value = getattr(node, name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                yield each


def _shares(tensor: torch.Tensor, record: Record) -> bool:
    return torch._C._has_storage(tensor) and torch.Tensor.untyped_storage(tensor)._cdata == record.key


def _compiled() -> bool:
    """Whether graphs are compiled as they are run: hooks would become a part of the program."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


ALONE = _objects_alone()
