"""What user code meets when it touches a weight.

    a program ends         every managed weight wears the guard class: it may be away
    user code touches one  __torch_function__: its bytes come back, the class goes, the call runs, the class
                           returns; what was written, and who still holds it, is noted
    Dynamo's guards begin  the classes go: to the program they are plain weights

A weight that no one touched stays away, and stays clean: evicting it again writes nothing. Its bytes are
taken for changed when its version has moved or when another tensor shares its storage. What user code still
holds is *exposed*: resident whenever user code runs. Counts that torch keeps decide that: of tensors per
storage (a view, `.data`, a state dict), of holders per tensor (eager autograd saved it).

Not seen, and therefore on the user's side: memory written through a raw pointer (`data_ptr`, a storage
object) after the step in which it was asked for, and C++ code that reads a weight without asking Python.
With torch.distributed, whose collectives are such code, all weights are exposed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code

from .no_bytes import NO_BYTES

if TYPE_CHECKING:
    from .records import Record

GUARDED: dict[type, type] = {}  # what a tensor is -> what it wears
BARE: dict[type, type] = {}  # and back


class Owner(Protocol):
    """The engine, as the guard needs it."""

    def open(self, records: list[Record], place: str) -> Any:
        """User code is about to use these: they are resident and stay, until `close`, which is given the
        result. `place` is the function of torch."""
        ...

    def close(self, records: list[Record], place: str, before: Any) -> None: ...


class Guard:
    """All weights of an engine that can wear the guard class. `bare` are those that do not at the moment."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.pid = os.getpid()
        self.records: dict[int, Record] = {}  # id of a tensor -> its storage's record
        self.bare: dict[int, ReferenceType[torch.Tensor]] = {}
        self.worn: dict[int, ReferenceType[torch.Tensor]] = {}
        self.off = False  # something runs that the guard cannot see: all weights are exposed

    def watch(self, tensor: torch.Tensor, record: Record) -> None:
        """One more tensor by which user code reaches this record's bytes."""
        key = id(tensor)
        if self.records.get(key) is record:
            return

        def gone(_: Any) -> None:
            self.records.pop(key, None)
            self.bare.pop(key, None)
            self.worn.pop(key, None)

        face = ref(tensor, gone)
        self.records[key] = record
        self.bare[key] = face
        record.faces = [*(known for known in record.faces if known() is not None), face]
        record.aliased |= record.references() > len(record.live_faces())
        record.guardable = record.guardable and type(tensor) in GUARDED

    def put_on(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """User code runs next, or goes on (then only these)."""
        if self.off or not self.bare:
            return
        keys = list(self.bare) if tensors is None else [id(t) for t in tensors if id(t) in self.bare]
        for key in keys:
            face = self.bare.get(key)
            tensor = face() if face is not None else None
            if face is not None and tensor is not None and type(tensor) in GUARDED:
                tensor.__class__ = GUARDED[type(tensor)]
                self.worn[key] = self.bare.pop(key)

    def take_off(self, tensors: Iterable[Any] | None = None) -> None:
        """A program of ours runs next, with these (None: it is not known which)."""
        if tensors is None:
            for face in self.worn.values():
                if (tensor := face()) is not None:
                    tensor.__class__ = BARE.get(type(tensor), type(tensor))
            self.bare.update(self.worn)
            self.worn.clear()
            return
        for tensor in tensors:
            if type(tensor) in BARE:
                tensor.__class__ = BARE[type(tensor)]
                key = id(tensor)
                if key in self.worn:
                    self.bare[key] = self.worn.pop(key)

    def exposed(self, record: Record) -> bool:
        """Whether user code may reach its bytes without being seen."""
        return self.off or record.exposed

    def end(self) -> None:
        self.take_off()
        self.off = True


ACTIVE: list[Guard] = []  # of the engine of this process, if there is one


def _touched(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in NO_BYTES:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    prior = set_eval_frame(None)  # Dynamo runs the frame that touched it, and would compile us
    try:
        return _serve(func, args, kwargs)
    finally:
        set_eval_frame(prior)


def _serve(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    worn = [tensor for tensor in _tensors(args, kwargs) if type(tensor) in BARE]
    guard = ACTIVE[0] if ACTIVE and ACTIVE[0].pid == os.getpid() else None
    records = [] if guard is None else _records(guard, worn)
    if guard is None:
        for tensor in worn:
            tensor.__class__ = BARE[type(tensor)]
        return func(*args, **kwargs)
    place = getattr(func, "__name__", str(func))
    guard.take_off(worn)
    before = ()
    try:
        before = guard.owner.open(records, place)
        return func(*args, **kwargs)
    finally:
        guard.owner.close(records, place, before)
        guard.put_on(worn)


def _records(guard: Guard, worn: list[torch.Tensor]) -> list[Record]:
    found = {id(r): r for tensor in worn if (r := guard.records.get(id(tensor))) is not None}
    return list(found.values())


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | set):
            yield from _tensors(*value)
        elif isinstance(value, dict):
            yield from _tensors(*value.values())


class _Guarded:
    """What both guard classes do. Methods of Parameter that torch calls without asking first are named."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _touched(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        return _touched(BARE[type(self)].__deepcopy__, (self, memo), {})  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _touched(BARE[type(self)].__reduce_ex__, (self, protocol), {})


class GuardedParameter(_Guarded, torch.nn.Parameter):
    """A Parameter that may be away."""


class GuardedTensor(_Guarded, torch.Tensor):
    """A module's buffer that may be away."""


for _function in (_touched, _Guarded.__torch_function__, _Guarded.__deepcopy__, _Guarded.__reduce_ex__):
    skip_code(_function.__code__)

GUARDED.update({torch.nn.Parameter: GuardedParameter, torch.Tensor: GuardedTensor})
BARE.update({guarded: bare for bare, guarded in GUARDED.items()})
