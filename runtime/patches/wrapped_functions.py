"""Wrappers of torch functions for which the observer is not enough. The observer detects reads of evicted
tensors by operators.

function                                      effect of the wrapper
reads a storage in C++, without an operator   the storage is fetched, and is resident during the call
takes lists of tensors                        if some of them are evicted, the function is called for one
                                              element at a time, because all elements together may not fit
gives an address to another library           the storage is never evicted again
takes an address                              the storage is fetched, and is resident to the end of the step;
                                              wrapped only if torch does not report taken addresses
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pkgutil import iter_modules
from typing import Any

import torch
import torch.utils.dlpack
from torch._dynamo import trace_rules
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from teraio import runtime
from teraio.runtime import patches

from ..eager import tensor_lists
from ..eager.tensor_lists import tensors_in
from ..engine import engine as _engine
from ..ledger.record import Record
from ..ledger.shards import local_tensor
from .pickling import is_saving

Function = Callable[..., Any]

READS = """
    copy_ fill_ resize_ _write_file _set_from_file _byteswap _share_fd_cpu_ _share_filename_cpu_
    __getitem__ __setitem__
"""
ADDRESSES: tuple[tuple[Any, str], ...] = (
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
)
WRITES = frozenset(["copy_", "fill_", "resize_", "_set_from_file", "_byteswap", "__setitem__"])

TAKES = ("data_ptr", "numpy", "apply_", "map_", "map2_")  # methods of tensors that take an address

_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    _hide_runtime_from_dynamo()
    for name in READS.split():
        function = getattr(torch.UntypedStorage, name, None)
        if function is not None:
            setattr(torch.UntypedStorage, name, _wrap_read(function, name))
    torch.Tensor.tolist = _wrap_read(torch.Tensor.tolist, "tolist")  # type: ignore[method-assign]
    for owner, name in ADDRESSES:
        if (function := getattr(owner, name, None)) is not None:
            setattr(owner, name, _wrap_address_export(function))
    for name in dir(torch):
        if tensor_lists.is_elementwise_list_function(name):
            setattr(torch, name, _wrap_list_function(getattr(torch, name), name))


def wrap_address_functions() -> None:
    """Wrap the functions that take the address of a tensor. Call this function only if the installed torch
    does not report taken addresses."""
    for owner, names in ((torch.Tensor, TAKES), (torch.UntypedStorage, ("data_ptr",))):
        for name in names:
            function = getattr(owner, name)
            if not hasattr(function, "teraio_takes"):
                setattr(owner, name, _wrap_address_read(function, name))


def _hide_runtime_from_dynamo() -> None:
    """Exclude teraio's runtime from compilation. Otherwise Dynamo would compile the runtime's hooks when they
    run in the backward of a compiled function.

    The wrappers of this file are not excluded. Dynamo traces a wrapper like the function that it wraps. So
    this file's neighbours are excluded one by one. All other packages are excluded as a whole, because each
    call of `add` compiles one pattern of all excluded paths.
    """
    get_torch_obj_rule_map()  # builds Dynamo's table of torch functions, before they are wrapped
    TorchInGraphFunctionVariable._get_handlers()
    own_package = __name__.rpartition(".")[0]
    excluded = {module.name for module in iter_modules(runtime.__path__, f"{runtime.__name__}.")}
    excluded |= {module.name for module in iter_modules(patches.__path__, f"{own_package}.")}
    for name in sorted(excluded - {own_package, __name__}):
        trace_rules.add(name)


def _wrap_read(function: Function, name: str) -> Function:
    @functools.wraps(function)
    def fetch_and_call(*args: Any, **kwargs: Any) -> Any:
        engine = _engine.current_engine()
        records = [] if engine is None else _evictable_records_among(engine, args)
        if engine is None or not records:
            return function(*args, **kwargs)
        with engine.user.hold_resident(records, name):
            try:
                return function(*args, **kwargs)
            finally:
                if name in WRITES:
                    records[0].wrote()

    return fetch_and_call


def _wrap_address_export(function: Function) -> Function:
    reading = _wrap_read(function, "to_dlpack")

    @functools.wraps(function)
    def call_and_keep_resident(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = reading(tensor, *args, **kwargs)
        if (engine := _engine.current_engine()) is not None and not kwargs.get("copy"):
            engine.user.keep_exported_resident(_storage_key(tensor))
        return result

    return call_and_keep_resident


def _wrap_address_read(function: Function, name: str) -> Function:
    @functools.wraps(function)
    def fetch_and_note_address(value: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _engine.current_engine()
        record = None if engine is None else engine.residency.records.get(_storage_key(value))
        moves = record is not None and (record.evictable or record.handed_out)
        if engine is None or record is None or not moves or engine.lock.is_held_by_this_thread or is_saving():
            return function(value, *args, **kwargs)
        assert engine.user.observer is not None
        with engine.user.hold_resident([record], name):
            engine.user.observer.note_address_taken(record.key)
            return function(value, *args, **kwargs)

    fetch_and_note_address.teraio_takes = True  # type: ignore[attr-defined]
    return fetch_and_note_address


def _wrap_list_function(function: Function, name: str) -> Function:
    @functools.wraps(function)
    def run_by_elements(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and (engine := _engine.current_engine()) is not None:
            observer, tensors = engine.user.observer, tensors_in(args)
            if len(tensors) < 2 or observer is None:
                return function(*args, **kwargs)
            if observer.some_are_evicted(list(map(local_tensor, tensors))):
                elements = tensor_lists.count_elements(name, args, kwargs)
                if elements > 1 and not _is_recorded_by_autograd(tensors):
                    return tensor_lists.call_for_each_element(function, args, kwargs, elements)
        return function(*args, **kwargs)

    return run_by_elements


def _is_recorded_by_autograd(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if autograd would record a call with these tensors. Autograd would record one node for the
    whole list."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _evictable_records_among(engine: _engine.Engine, values: Iterable[Any]) -> list[Record]:
    return [
        record
        for record in engine.residency.records_of_storages(map(_storage_key, values))
        if record.evictable
    ]


def _storage_key(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        local = local_tensor(value)
        return torch.Tensor.untyped_storage(local)._cdata if torch._C._has_storage(local) else 0
    return value._cdata if isinstance(value, torch.UntypedStorage) else 0
