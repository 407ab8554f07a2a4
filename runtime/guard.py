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

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch._C import DisableTorchFunctionSubclass
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.eval_frame import skip_code
from torch.autograd import forward_ad

from teraio.errors import EvictedError

from . import elementwise
from .edges import Call
from .no_bytes import ENDS_A_GRADIENT, NO_BYTES

if TYPE_CHECKING:
    from .records import Record

# They run programs, hooks and user code: weights among their arguments are only where gradients go.
RUNS_BACKWARD = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})

GUARDED: dict[type, type] = {}  # what a tensor is -> what it wears
BARE: dict[type, type] = {}  # and back


class Owner(Protocol):
    """The engine, as the guard needs it."""

    def open(self, records: list[Record], place: str) -> Any:
        """User code is about to use these: they are resident and stay, until `close`, which is given these
        weights and what was called with them, or neither if that is a backward's node. `place` is the
        function of torch."""
        ...

    def close(
        self,
        records: list[Record],
        place: str,
        before: Any,
        used: Sequence[torch.Tensor] = (),
        call: Call | None = None,
    ) -> None: ...

    def record_at(self, key: int) -> Record | None: ...

    def gave_address(self, key: int) -> None:
        """Others have the address of this storage's bytes."""
        ...


class Guard:
    """All weights of an engine that can wear the guard class. `bare` are those that do not at the moment."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.pid = os.getpid()
        self.records: dict[int, Record] = {}  # id of a tensor -> its storage's record
        self.bare: dict[int, ReferenceType[torch.Tensor]] = {}
        self.worn: dict[int, ReferenceType[torch.Tensor]] = {}
        self.lent: set[int] = set()  # ids of tensors that an optimizer's update has
        self.lent_records: list[Record] = []  # which stay meanwhile, whatever programs it runs
        self.taken_off = False  # Dynamo takes them all for plain tensors at the moment
        self.off = False  # something runs that the guard cannot see: all weights are exposed

    def watch(self, tensor: torch.Tensor, record: Record, fresh: bool = False) -> None:
        """One more tensor by which user code reaches this record's bytes. A `fresh` one was just made, and
        what made it still holds it."""
        known = self.records.get(id(tensor))
        if known is record:
            return
        if known is not None:
            self.unwatch(tensor, known)
        face = self._follow(tensor, record)
        record.faces = [*(known for known in record.faces if known() is not None), face]
        if not fresh:
            record.aliased |= record.shared()
        record.guardable = record.guardable and type(tensor) in GUARDED

    def unwatch(self, tensor: torch.Tensor, record: Record) -> None:
        """It has other bytes now. Those of the record may be someone else's, whom the guard does not see."""
        for faces in (record.faces, record.echoes):
            faces[:] = [face for face in faces if face() is not tensor]
        for known in (self.records, self.bare, self.worn):
            known.pop(id(tensor), None)
        record.aliased |= record.shared()

    def echo(self, tensor: torch.Tensor, record: Record) -> None:
        """A tensor that `detach` made of one that is watched."""
        echoes = [known for known in record.echoes if known() is not None]
        record.echoes = [*echoes, self._follow(tensor, record)]
        self.put_on([tensor])

    def _follow(self, tensor: torch.Tensor, record: Record) -> ReferenceType[torch.Tensor]:
        """Records of an engine that has ended live as long as its programs: they do not hold the engine."""
        key, guard = id(tensor), ref(self)

        def gone(_: Any) -> None:
            if (own := guard()) is not None:
                for known in (own.records, own.bare, own.worn):
                    known.pop(key, None)

        face = ref(tensor, gone)
        self.records[key] = record
        self.bare[key] = face
        return face

    def put_on(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """User code runs next, or goes on (then only these)."""
        self.taken_off &= tensors is not None
        if not self.bare:
            return
        if tensors is None:
            keys = [key for key in self.bare if key not in self.lent]
        else:
            keys = [id(t) for t in tensors if id(t) in self.bare]
        if self.off:
            keys = [key for key in keys if self.records[key].kind == "state"]
        for key in keys:
            face = self.bare.get(key)
            tensor = face() if face is not None else None
            if face is not None and tensor is not None and type(tensor) in GUARDED:
                tensor.__class__ = GUARDED[type(tensor)]
                self.worn[key] = self.bare.pop(key)

    def take_off(self, tensors: Iterable[Any] | None = None) -> None:
        """A program of ours runs next, with these (None: it is not known which)."""
        if tensors is None:
            self.taken_off = True
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

    def lend(self, tensors: Sequence[torch.Tensor]) -> None:
        """To an optimizer's update: plain, whatever else puts the guard on, until they are taken back."""
        self.take_off(tensors)
        self._lend({id(tensor) for tensor in tensors})

    def take_back(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._lend(set())
        self.put_on(tensors)

    def _lend(self, keys: set[int]) -> None:
        for record in self.lent_records:
            record.pins -= 1
        self.lent = keys
        self.lent_records = [known for key in keys if (known := self.records.get(key)) is not None]
        for record in self.lent_records:
            record.pins += 1

    def notice_other_bytes(self, tensors: Iterable[torch.Tensor]) -> None:
        """Of tensors that were given others: `p.data = q`."""
        with DisableTorchFunctionSubclass():
            for tensor in tensors:
                record = self.records.get(id(tensor))
                if record is not None and torch.Tensor.untyped_storage(tensor)._cdata != record.key:
                    self.unwatch(tensor, record)

    def exposed(self, record: Record) -> bool:
        """Whether user code may reach its bytes without being seen. Optimizer states are no one's but the
        optimizer's, whatever else runs."""
        return record.exposed or (self.off and record.kind != "state")

    def end(self) -> None:
        self.take_off()
        self.off = True


class _InStateDict(threading.local):
    depth = 0  # of calls of `Module.state_dict` in this thread


IN_STATE_DICT = _InStateDict()


def describes_itself(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Module.state_dict`: what it detaches need not come back for it, and does not stay here."""

    @functools.wraps(state_dict)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        IN_STATE_DICT.depth += 1
        try:
            return state_dict(*args, **kwargs)
        finally:
            IN_STATE_DICT.depth -= 1

    return guarded


ACTIVE: list[Guard] = []  # of the engine of this process, if there is one


def active() -> Guard | None:
    """None as well in a fork of its process."""
    return ACTIVE[0] if ACTIVE and ACTIVE[0].pid == os.getpid() else None


def _detached(tensor: torch.Tensor) -> torch.Tensor | None:
    """Another tensor of the same bytes, which wears the guard class as well: a state dict of a model brings
    nothing back, and keeps nothing here. None: this is not the plain case."""
    guard = active()
    record = guard.records.get(id(tensor)) if guard is not None else None
    if guard is None or record is None or guard.off or record.dead() or forward_ad._current_level >= 0:
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.is_inference_mode_enabled():
        return None
    with DisableTorchFunctionSubclass():
        result = tensor.detach()
        same = type(result) is torch.Tensor and torch.Tensor.untyped_storage(result)._cdata == record.key
    if not same:
        return None
    guard.echo(result, record)
    return result


def touched(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in NO_BYTES:
        with DisableTorchFunctionSubclass():
            old = args[0].grad if func in ENDS_A_GRADIENT else None  # noqa: F841  ends where the guard is asked
            return func(*args, **kwargs)
    if func in RUNS_BACKWARD:
        return func(*args[:1], *_edges(args[1:]), **dict(zip(kwargs, _edges(tuple(kwargs.values())))))
    if func is torch.Tensor.detach and IN_STATE_DICT.depth and (result := _detached(args[0])) is not None:
        return result
    prior = set_eval_frame(None)  # Dynamo runs the frame that touched it, and would compile us
    try:
        return _serve(func, args, kwargs)
    finally:
        set_eval_frame(prior)


def _edges(values: Any) -> Any:
    """For a backward: weights it ends at are named by their place in the graph. Their bytes are not asked
    for, and the guard stays on while hooks run."""
    if isinstance(values, list | tuple):
        return type(values)(map(_edges, values))
    if type(values) in BARE and values.is_leaf and values.requires_grad:
        with DisableTorchFunctionSubclass():
            return torch.autograd.graph.get_gradient_edge(values)
    return values


def _serve(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    worn = [tensor for tensor in _tensors(args, kwargs) if type(tensor) in BARE]
    guard = active()
    place = getattr(func, "__name__", str(func))
    if guard is None:
        _refuse_away(worn, place)
        for tensor in worn:
            tensor.__class__ = BARE[type(tensor)]
        return func(*args, **kwargs)
    if len(worn) > 1 and (elements := elementwise.length(place, args, kwargs)) > 1:
        return elementwise.one_by_one(func, args, kwargs, elements)
    records = _records(guard, worn)
    guard.take_off(worn)
    before, result, first = (), None, torch._C._autograd._get_sequence_nr()
    try:
        before = guard.owner.open(records, place)
        result = func(*args, **kwargs)
        return result
    finally:
        guard.owner.close(records, place, before, worn, Call(result, (args, kwargs), first))
        if writes(func):
            for record in records:
                record.clean = False
        guard.notice_other_bytes(worn)
        guard.put_on(worn)


TORCHS_OWN = frozenset({"aten", "prim", "prims"})  # namespaces of operators whose writes move a version


def writes(func: Callable[..., Any]) -> bool:
    """An operator of others that says that it writes; perhaps no version tells."""
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace not in TORCHS_OWN and func._schema.is_mutable
    if isinstance(func, torch._ops.OpOverloadPacket):
        return any(writes(getattr(func, name)) for name in func.overloads())
    return False


def _refuse_away(worn: list[torch.Tensor], place: str) -> None:
    """No engine is here to bring them: reading an emptied storage would end the process."""
    with DisableTorchFunctionSubclass():
        away = [t for t in worn if t.numel() and not torch.Tensor.untyped_storage(t).nbytes()]
    if away:
        known = ACTIVE[0].records.get(id(away[0])) if ACTIVE else None
        raise nobody_brings(known.name if known else "a weight", place)


def nobody_brings(name: str, place: str) -> EvictedError:
    return EvictedError(
        f"user code ({place}) needs {name}, which is away, and this process ends, or was forked from the one "
        f"that can bring it back. Fork inside `with teraio.resident(model):`, or start processes by 'spawn'"
    )


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
        return touched(func, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> Any:
        bare: Any = BARE[type(self)]

        def deepcopy(tensor: torch.Tensor) -> Any:
            return bare.__deepcopy__(tensor, memo)  # what was copied before is in there: it need not come

        return touched(deepcopy, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch.no_grad():  # what it returns is in no graph, whatever it holds
            return touched(BARE[type(self)].__reduce_ex__, (self, protocol), {})


class GuardedParameter(_Guarded, torch.nn.Parameter):
    """A Parameter that may be away."""


class GuardedTensor(_Guarded, torch.Tensor):
    """A module's buffer that may be away."""


for _function in (touched, _Guarded.__torch_function__, _Guarded.__deepcopy__, _Guarded.__reduce_ex__):
    skip_code(_function.__code__)

GUARDED.update({torch.nn.Parameter: GuardedParameter, torch.Tensor: GuardedTensor})
BARE.update({guarded: bare for bare, guarded in GUARDED.items()})
