"""Compilation in place. In: a module and options. Out: the same module, whose calls run compiled code.

Torch calls the attribute `_compiled_call_impl` of a module instead of the module's own code, if it is set.
The keys of the state dict do not change, and copies of the module are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch

PLACE = "_compiled_call_impl"
_CODES: WeakKeyDictionary[type, CodeType] = WeakKeyDictionary()  # class of modules -> code of its calls


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

    call = module._call_impl
    if trace_rules.check(module.forward):
        call = _function_to_trace(module)
    compiled = (compile_function or torch.compile)(
        call, backend="teraio", options=dict(options or {}) or None
    )
    vars(module)[PLACE] = compiled


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
