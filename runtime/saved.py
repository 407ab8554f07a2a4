"""What eager autograd saved of a weight comes back when it is read, and may be away until then.

    user code calls a function     nodes of autograd's keep the weight, or views of it, for the backward
    one of them reads what it kept autograd asks us for it: the bytes come back
    when that node has run         a hook of it: they may leave again

That is enough only if these nodes account for everything that the call left holding the weight: its tensors'
holders in C++, and other tensors of its bytes. If they do not, someone may read the bytes unseen.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Kept:
    """One of the tensors that a node saved."""

    node: Any
    name: str  # of the attribute of the node
    at: int  # in it, if it is a list
    tensor: torch.Tensor

    def asks(self, reader: Reader) -> None:
        """The node asks the reader for it from now on."""
        saved = getattr(self.node, "_raw" + self.name)
        saved = saved[self.at] if isinstance(saved, list | tuple) else saved
        with torch._C._DisableTorchDispatch():  # modes are for what the user does
            saved.register_hooks(reader.keep, reader.read)
        self.node.register_hook(_end_of(reader))


NAMES: dict[type, tuple[str, ...]] = {}  # of a kind of nodes: attributes that may hold tensors


class Reader:
    """Of a weight that a node saved, or of a view of it. The node lets go of it when it has run; anyone else
    who asks the node for it, when the tensor that he got is gone."""

    __slots__ = ("__weakref__", "expected", "face", "node", "open", "place", "record", "tensor")

    def __init__(self, record: Record, kept: Kept) -> None:
        self.record = record
        self.place = kept.node.name()
        self.node: int = kept.node._sequence_nr()  # the node itself has the reader
        # A weight may have been given other bytes since, and they are what is read.
        self.face = any(kept.tensor is face for face in record.live_faces())
        self.tensor = kept.tensor
        self.expected = kept.tensor._version
        self.open: tuple[Guard, Record, Any] | None = None

    def keep(self, tensor: torch.Tensor) -> None:
        if not self.face:
            self.tensor = tensor  # out of its graph, which would have it for ever

    def read(self, _: None) -> torch.Tensor:
        self.ends()
        self._refuse_written()
        guard = active()
        if guard is None:
            if (storage := self.record.storage()) is not None and not storage.nbytes():
                raise nobody_brings(self.record.name, self.place)
            return self.tensor
        records, owner = guard.records, guard.owner
        record = records.get(id(self.tensor)) if self.face else owner.record_at(self.record.key)
        if record is not None and not record.dead():
            self._open(guard, record)
        return self.tensor

    def _refuse_written(self) -> None:
        """Of what hooks give it autograd does not look at that."""
        if self.tensor._version != self.expected:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: {self.record.name}, or a view of it, which {self.place} needs, is at version "
                f"{self.tensor._version}; expected version {self.expected} instead"
            )

    def _open(self, guard: Guard, record: Record) -> None:
        try:
            self.open = guard, record, guard.owner.open([record], self.place)
        except BaseException:
            record.pins -= 1
            raise
        node = torch._C._current_autograd_node()
        if node is None or node._sequence_nr() != self.node:
            record.aliased = True  # by what is given to him now
            self.ends()

    def ends(self) -> None:
        opened, self.open = self.open, None
        if opened is not None:
            guard, record, before = opened
            guard.owner.close([record], "", before)

    def __del__(self) -> None:
        self.ends()


def _end_of(reader: Reader) -> Callable[..., None]:
    """A hook that runs after the node. What was saved goes with a backward, the node with the last that came
    of it: so it has not the reader."""
    weak = ref(reader)

    def has_run(*_: Any) -> None:
        if (reader := weak()) is not None:
            reader.ends()

    skip_code(has_run.__code__)
    return has_run


for _method in (Reader.keep, Reader.read, Reader.ends, Reader.__del__):
    skip_code(_method.__code__)  # a graph may end while Dynamo looks at what runs


def left_to_nodes(record: Record, before: tuple[int, int], call: Call) -> bool:
    """Whether nodes of this call keep all that came to hold the record. They have hooks from then on."""
    kept = _kept(record, before, call)
    for each in kept or ():
        each.asks(Reader(record, each))
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
        kept = [each for node in nodes for each in _saved_by(node) if _shares(each.tensor, record)]
        tensors, holders = record.watch_others()
        return kept if _accounted(record, kept) == (tensors - before[0], holders - before[1]) else None


def _accounted(record: Record, kept: list[Kept]) -> tuple[int, int] | None:
    """How many tensors share the bytes because of these nodes, and how many holders the record's own have.
    None: what was saved has others, too."""
    faces = {id(face) for face in record.live_faces()}
    times = Counter(id(each.tensor) for each in kept)
    holders = sum(times[face] for face in faces)
    views = times.keys() - faces
    for view in views:
        at = next(at for at in range(len(kept)) if id(kept[at].tensor) == view)
        if _objects(kept, at) != ALONE + times[view] - 1 or _uses(kept, at) != times[view] + WRAPPED:
            return None
        holders += id(kept[at].tensor._base) in faces
    return len(views), holders


def _objects(kept: list[Kept], at: int) -> int:
    return sys.getrefcount(kept[at].tensor)


def _uses(kept: list[Kept], at: int) -> int:
    return int(kept[at].tensor._use_count())  # type: ignore[attr-defined]


@torch.inference_mode(False)
@torch.enable_grad()
def _objects_alone() -> int:
    """For a view that a node alone has: the looking itself, and what torch adds, which differs by version."""
    end = torch.ones(1, 1, requires_grad=True) @ torch.ones(1, 1).t()
    return _objects(list(_saved_by(end.grad_fn)), 0)


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


def _saved_by(node: Any) -> Iterator[Kept]:
    """A function of the user's, written in Python, does not tell: what it keeps is not accounted for."""
    kind = type(node)
    if kind not in NAMES:
        NAMES[kind] = tuple(name for name in dir(kind) if name.startswith("_saved_"))
    for name in NAMES[kind]:
        value = getattr(node, name)
        for at, each in enumerate(value if isinstance(value, list | tuple) else (value,)):
            if isinstance(each, torch.Tensor):
                yield Kept(node, name, at, each)


def _shares(tensor: torch.Tensor, record: Record) -> bool:
    return torch._C._has_storage(tensor) and torch.Tensor.untyped_storage(tensor)._cdata == record.key


def _compiled() -> bool:
    """Whether graphs are compiled as they are run: hooks would become a part of the program."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


ALONE = _objects_alone()
