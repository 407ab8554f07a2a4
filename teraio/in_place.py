"""Compilation in place. In: a module and options. Out: the same module, whose calls run compiled code.

Torch calls the attribute `_compiled_call_impl` of a module instead of the module's own code, if it is set.
The keys of the state dict do not change, and copies of the module are not compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

PLACE = "_compiled_call_impl"
_OWNERS: WeakSet[type] = WeakSet()  # classes whose own `__getstate__` now leaves out the call
_CODES: WeakKeyDictionary[type, CodeType] = WeakKeyDictionary()  # class of modules -> code of its calls


class OwnCall:
    """A call that belongs to one module, and is in the place of the module's code.

    A copy and a pickle of it are None, because a copy of the module must not call the original module.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class CompiledCall(OwnCall):
    """The compiled call of a module."""

    __slots__ = ("compiled",)

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def put_call(module: torch.nn.Module, call: OwnCall) -> None:
    """Put the call into the place of the module's code. Copies and pickles of the module do not have it.

    Torch's `Module.__getstate__` leaves the call out. A class with a method of its own may keep it, for
    example torch's recurrent layers.
    """
    vars(module)[PLACE] = call
    owner = next(kind for kind in type(module).__mro__ if "__getstate__" in vars(kind))
    if owner is not torch.nn.Module and owner not in _OWNERS:
        _OWNERS.add(owner)
        _leave_call_out_of_state(owner)


def _leave_call_out_of_state(owner: type) -> None:
    own: Callable[[Any], Any] = vars(owner)["__getstate__"]

    @functools.wraps(own)
    def state_without_call(self: Any) -> Any:
        state = own(self)
        return {key: state[key] for key in state if key != PLACE} if type(state) is dict else state

    owner.__getstate__ = state_without_call  # type: ignore[assignment]


def compile_in_place(
    module: torch.nn.Module,
    options: Mapping[str, Any] | None = None,
    compile_function: Callable[..., Any] | None = None,
) -> None:
    """Compile the calls of this module with teraio. `compile_function` replaces `torch.compile`.

    `module.compile()` has no effect on a class of torch.nn, because Dynamo never begins a trace in a function
    of torch. So for such a module, the trace begins in a function that Dynamo does not skip.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.eval_frame import skip_code

    # All compiled calls share this code. A trace must begin in the module's code.
    skip_code(CompiledCall.__call__.__code__)
    call = module._call_impl
    if trace_rules.check(module.forward):
        call = _function_to_trace(module)
    compiled = (compile_function or torch.compile)(
        call, backend="teraio", options=dict(options or {}) or None
    )
    put_call(module, CompiledCall(compiled))


def _function_to_trace(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls the module.

    Each class has its own code, because Dynamo compiles a code object only a few times. Modules of one class
    share its code, so that Dynamo can run one graph for all of them.
    """
    call = module._call_impl

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    code = _CODES.setdefault(
        type(module), call_module.__code__.replace(co_name=f"call_{type(module).__name__}")
    )
    return FunctionType(code, globals(), closure=call_module.__closure__)
