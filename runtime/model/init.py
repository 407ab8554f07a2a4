"""Models that are constructed within the budget: what a module is given may leave at once.

    torch.empty(...)            room for it is made first, and it is counted
    module.weight = Parameter   it is known to the engine, and may be evicted; so is a Parameter
                                that is made for a copied module, which no one gives it
    init.normal_(weight)        it is fetched for that; afterwards it may be evicted again

Nothing of the construction itself changes: the same calls in the same order draw the same random numbers. No
program knows these tensors yet, so what leaves is what was used least recently. A program that gets one as
its argument gives it the name that the user knows (`Registry.register_program_tensor`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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

# Hugging Face's loader reads ahead in threads, as far as they get, and has a switch of its own against it.
ONE_AT_A_TIME = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}


class Construction:
    """One block of construction, in one thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.mover.device.device  # what is made elsewhere is not within the budget
        self.thread = threading.get_ident()
        self.given: list[tuple[str, ReferenceType[torch.Tensor]]] = []  # to modules; they may get other bytes
        self.count = 0

    def track_module_tensor(self, module: torch.nn.Module, name: str, tensor: Any) -> None:
        """A module was given a parameter or a buffer."""
        if isinstance(tensor, torch.Tensor):
            self.track_tensor(f"{type(module).__name__}.{name}", tensor)

    def track_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if threading.get_ident() == self.thread:
            self.register_tensor(name, tensor)
            self.given.append((name, ref(tensor)))

    @hold_lock_during_method
    def register_tensor(self, name: str, tensor: torch.Tensor) -> None:
        self.engine.residency.serial += 1
        if _is_on_device(self.device, tensor):
            if self.device.type == "cpu":
                self._copy_out_of_file(name, tensor)
            self.count += 1
            self.engine.registry.register_module_tensor(tensor, f"{name} ({self.count})")

    def _copy_out_of_file(self, name: str, tensor: torch.Tensor) -> None:
        """A part of a file that is mapped, as loaders leave it, becomes memory that can be emptied. What no
        one else can see changed is copied without being asked for."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch.Tensor.untyped_storage(tensor)
            if is_resizable(storage) or not EXCHANGES or not _is_mapped_file(storage):
                return
            self.make_room(storage.nbytes(), name)
            copy_to_torch_allocator(Candidate(name, storage, [tensor]))

    @hold_lock_during_method
    def make_room(self, size_bytes: int, place: str) -> None:
        """So many bytes more fit when this returns, as far as that can be."""
        residency, user = self.engine.residency, self.engine.user
        residency.serial += 1
        if not residency.fits(size_bytes):
            self._reregister_replaced_tensors()
            short, _ = residency.evict_until_fits(size_bytes, None, user.must_be_resident)
            if short > 0:
                user.report_overrun(short, place)
        counts = self.engine.mover.counts
        counts.peak_bytes = max(counts.peak_bytes, self.engine.mover.resident_bytes + size_bytes)

    def _reregister_replaced_tensors(self) -> None:
        """`module.half()`, lazy modules: the same parameter has got other bytes."""
        records = self.engine.known_tensors.records
        given, self.given = self.given, []  # taking one in may lead back here
        for name, known in given:
            tensor = known()
            if tensor is not None:
                self.given.append((name, known))
                record = records.get(id(tensor))
                if record is None or record.is_dead():
                    self.register_tensor(name, tensor)

    @hold_lock_during_method
    def count_new_tensor(self, tensor: torch.Tensor) -> None:
        """It counts until it is gone, or until a module is given it."""
        self.count += 1
        self.engine.registry.register_immovable(tensor, f"made ({self.count})", "outside")


def _is_mapped_file(storage: torch.UntypedStorage) -> bool:
    """Its memory is a mapped file, and what is written there is seen by no other process."""
    begin = storage.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, inode, *_ = line.split(None, 5)
        low, _, high = span.partition("-")
        if int(low, 16) <= begin < int(high, 16):
            return inode != "0" and rights[1] + rights[3] != "ws"
    return False


class MakeRoomMode(TorchDispatchMode):
    """Every operation of the block: room before, count after."""

    def __init__(self, making: Construction) -> None:
        super().__init__()
        self.making = making

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or Dynamo would give up compiling what is called in the block, for good."""
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
    """What an operation is about to allocate there: its results' bytes, tried on tensors without any. Of one
    that cannot say before it has seen numbers, nothing is known."""
    if any(result.alias_info is not None for result in func._schema.returns):
        return 0  # a view, or in place
    given = tensors_in((*args, *kwargs.values()))
    elsewhere = {t.device for t in given if t.device.type not in ("cpu", "meta")}
    if any(not is_same_memory(device, budgeted) for device in elsewhere):
        return 0  # it would be computed there, and random numbers drawn, once more
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
def _track_new_parameters(making: Construction) -> Iterator[None]:
    """`copy.deepcopy` of a module makes parameters and registers none."""
    make = torch.nn.Parameter.__new__

    @functools.wraps(make)
    def make_and_track(cls: type, *args: Any, **kwargs: Any) -> Any:
        parameter: Any = make(cls, *args, **kwargs)
        if type(parameter) is torch.nn.Parameter:
            making.track_tensor("Parameter", parameter)
        return parameter

    torch.nn.Parameter.__new__ = make_and_track  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Parameter.__new__ = make  # type: ignore[method-assign]


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


_MAKING: list[Construction] = []  # the block that is open


@contextmanager
def construct_within_budget(engine: Engine) -> Iterator[None]:
    """What modules are given in the block belongs to the engine."""
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
        stack.enter_context(_set_environment_temporarily(ONE_AT_A_TIME))
        stack.enter_context(MakeRoomMode(making))
        yield
        making.make_room(0, "construction")
        engine.user.resume_user_code()
