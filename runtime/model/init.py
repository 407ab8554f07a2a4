"""The construction of models within the budget. A tensor may be evicted as soon as code assigns it to a
module.

    torch.empty(...)            the engine first makes room, and then counts the new tensor
    module.weight = Parameter   the engine registers the tensor and may evict it
    copy.deepcopy(module)       the engine registers each new Parameter, although torch calls no hook
    module.to(...)              the engine registers each tensor of the module as soon as it has moved
    init.normal_(weight)        the engine fetches the weight, and may evict it again afterwards

The construction itself does not change. The same calls run in the same order, so they draw the same random
numbers. No program uses the tensors yet, so the engine evicts the least recently used tensors first.

At first, the engine names a tensor after its module's class. A program may later take the tensor as an
argument. Then the engine renames the tensor to its name in the user's model
(`Registry.register_program_tensor`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.nn.modules import module as _modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..device.device import is_same_memory
from ..eager.tensor_lists import tensors_in
from ..engine.engine import Engine
from ..ledger.adoption import EXCHANGES, Candidate, copy_to_torch_allocator, is_resizable
from ..ledger.engine_lock import hold_lock_during_method

# Hugging Face's loader uses threads to read tensors ahead, without a limit of bytes. This variable disables
# the threads.
ONE_AT_A_TIME = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}


class Construction:
    """A `with` block in which one thread constructs models within the engine's budget."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.mover.device.device  # the budget covers only this device
        self.thread = threading.get_ident()
        # Names and weak references of the tensors that code assigned to modules.
        self.given: list[tuple[str, ReferenceType[torch.Tensor]]] = []
        self.count = 0

    def track_module_tensor(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """Register a parameter or buffer with the engine, when code assigns it to a module."""
        if isinstance(tensor, torch.Tensor):
            self.track_tensor(f"{type(module).__name__}.{name}", tensor)

    def track_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if threading.get_ident() == self.thread:
            self.register_tensor(name, tensor)
            self.given.append((name, ref(tensor)))

    @hold_lock_during_method
    def register_tensor(self, name: str, tensor: torch.Tensor) -> None:
        self.engine.residency.advance_slot()
        if _is_on_device(self.device, tensor):
            if self.device.type == "cpu":
                self._copy_out_of_file(name, tensor)
            self.count += 1
            self.engine.registry.register_module_tensor(tensor, f"{name} ({self.count})")

    def _copy_out_of_file(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor from a mapped file to memory of torch's allocator, because the engine cannot free the
        memory of a mapped file. Some loaders of models return tensors in mapped files.

        If writes to the tensor reach the file, do not copy the tensor.
        """
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch.Tensor.untyped_storage(tensor)
            if is_resizable(storage) or not EXCHANGES or not _is_mapped_file(storage):
                return
            self.make_room(storage.nbytes(), name)
            copy_to_torch_allocator(Candidate(name, storage, [tensor]))

    @hold_lock_during_method
    def make_room(self, size_bytes: int, place: str) -> None:
        """Evict tensors until `size_bytes` more fit in the budget. If they still do not fit, report the
        missing bytes as an overrun of the budget."""
        residency, user = self.engine.residency, self.engine.user
        residency.advance_slot()
        if not residency.fits(size_bytes):
            self._reregister_replaced_tensors()
            short, _ = residency.evict_until_fits(size_bytes, None, user.must_be_resident)
            if short > 0:
                residency.report_overrun(short, place)
        residency.note_peak(size_bytes)

    def _reregister_replaced_tensors(self) -> None:
        """Register parameters again if their storage was replaced, for example by `module.half()` or in a
        lazy module."""
        records = self.engine.known_tensors.records
        # Empty the list first, because registration may call this method again.
        given, self.given = self.given, []
        for name, known in given:
            tensor = known()
            if tensor is not None:
                self.given.append((name, known))
                record = records.get(id(tensor))
                if record is None or record.is_dead():
                    self.register_tensor(name, tensor)

    @hold_lock_during_method
    def count_new_tensor(self, tensor: torch.Tensor) -> None:
        """Count a new tensor in the budget until it is freed or assigned to a module."""
        self.count += 1
        self.engine.registry.register_immovable(tensor, f"made ({self.count})", "outside")


def _is_mapped_file(storage: torch.UntypedStorage) -> bool:
    """Return True if the storage's memory is a mapped file and writes to this memory do not reach the
    file."""
    begin = storage.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split(None, 5)
        low, _, high = span.partition("-")
        if int(low, 16) <= begin < int(high, 16):
            return inode != "0" and rights[1] + rights[3] != "ws"
    return False


class MakeRoomMode(TorchDispatchMode):
    """A torch mode that counts the results of every operation in the `with` block in the budget. Before the
    operation, it makes room for the results by evictions."""

    def __init__(self, making: Construction) -> None:
        super().__init__()
        self.making = making

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that Dynamo ignores this mode. Otherwise Dynamo would never again compile a
        function that was called in the `with` block."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on = self.making.device
        if (size_bytes := _bytes_to_allocate(func, args, kwargs, on)) > 0:
            self.making.make_room(size_bytes, func._schema.name)
        result = func(*args, **kwargs)
        for tensor in tensors_in((result,)):
            if type(tensor) is torch.Tensor and _is_on_device(on, tensor):
                self.making.count_new_tensor(tensor)
        return result


_RAM = torch.device("cpu")


def _is_on_device(device: torch.device, tensor: torch.Tensor) -> bool:
    return is_same_memory(device, tensor.device) and tensor.layout == torch.strided


def _bytes_to_allocate(func: Any, args: Any, kwargs: Any, budgeted: torch.device) -> int:
    """Return the number of bytes that an operation will allocate for its results on the budgeted device. To
    find the sizes, run the operation on the device `meta`.

    Return 0 if the run on `meta` fails, for example because the sizes depend on values in a tensor.
    """
    if any(result.alias_info is not None for result in func._schema.returns):
        return 0  # the operation returns a view or works in place
    given = tensors_in((*args, *kwargs.values()))
    elsewhere = {t.device for t in given if t.device.type not in ("cpu", "meta")}
    if any(not is_same_memory(device, budgeted) for device in elsewhere):
        return 0  # the operation runs on another device, so its results take no bytes of the budget
    device = kwargs.get("device")
    on = [torch.device(device)] if device is not None else [t.device for t in given if t.ndim] or [_RAM]
    if not is_same_memory(on[0], budgeted):
        return 0
    if device is not None or not given:
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        args, kwargs = tree_map(lambda value: _as_meta_tensor(value, budgeted), (args, kwargs))
        results = func(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return 0
    return sum(tensor.nbytes for tensor in tensors_in((results,)))


def _as_meta_tensor(value: Any, budgeted: torch.device) -> Any:
    if not isinstance(value, torch.Tensor) or not (
        _is_on_device(budgeted, value) or (_is_on_device(_RAM, value) and value.ndim)
    ):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@contextmanager
def _replace_method(owner: type, name: str, replace: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Put `replace(method)` in the place of a method in the `with` block."""
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(replace(method)))
    try:
        yield
    finally:
        setattr(owner, name, method)


def _track_new_parameters(making: Construction) -> AbstractContextManager[None]:
    """Register with the engine all parameters that code makes in the `with` block. Torch's registration hooks
    are not enough, because `copy.deepcopy` does not call them."""

    def replace(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_and_track(cls: type, *args: Any, **kwargs: Any) -> Any:
            parameter: Any = make(cls, *args, **kwargs)
            if type(parameter) is torch.nn.Parameter:
                making.track_tensor("Parameter", parameter)
            return parameter

        return make_and_track

    return _replace_method(torch.nn.Parameter, "__new__", replace)


def _track_moved_modules(making: Construction) -> AbstractContextManager[None]:
    """Register with the engine all tensors of modules that move in the `with` block, to the budgeted device
    or to another type. Torch gives the same Parameter another storage, and calls no hook."""

    def replace(move: Callable[..., Any]) -> Callable[..., Any]:
        def move_and_track(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = move(self, *args, **kwargs)
            for tensors in (self._parameters, self._buffers):
                for name, tensor in tensors.items():
                    making.track_module_tensor(self, name, tensor)
            return result

        return move_and_track

    return _replace_method(torch.nn.Module, "_apply", replace)


@contextmanager
def _set_environment_temporarily(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_MAKING: list[Construction] = []  # the running construction; empty if there is none


@contextmanager
def construct_within_budget(engine: Engine) -> Iterator[None]:
    """Register with the engine each tensor that code assigns to a module in the `with` block. The engine may
    then evict the tensor."""
    if _MAKING and _MAKING[0].engine is engine:
        yield
        return
    making = Construction(engine)
    with ExitStack() as stack:
        stack.callback(_MAKING.remove, making)
        _MAKING.append(making)
        for register in (
            _modules.register_module_parameter_registration_hook,
            _modules.register_module_buffer_registration_hook,
        ):
            stack.callback(register(making.track_module_tensor).remove)
        stack.enter_context(_track_new_parameters(making))
        stack.enter_context(_track_moved_modules(making))
        stack.enter_context(_set_environment_temporarily(ONE_AT_A_TIME))
        stack.enter_context(MakeRoomMode(making))
        yield
        making.make_room(0, "construction")
        engine.user.resume_user_code()
