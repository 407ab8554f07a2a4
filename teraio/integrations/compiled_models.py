"""Compilation in place, for the models of trainers. In: a module and options. Out: the same module, whose
calls run compiled code.

The keys of the state dict do not change, and copies of the module are not compiled.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.eval_frame import OptimizedModule

# The modules that this package has compiled, with their options.
COMPILED: WeakKeyDictionary[torch.nn.Module, Mapping[str, Any]] = WeakKeyDictionary()


def compile_in_place(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the calls of this module with teraio.

    `module.compile()` has no effect on a class of torch.nn, because Dynamo never begins a trace in a function
    of torch. So such a module gets a function of this file, from which the trace begins.
    """
    COMPILED[module] = dict(options)
    if not type(module).__module__.startswith("torch.nn"):
        module.compile(backend="teraio", options=dict(options))
        return

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call_module, backend="teraio", options=dict(options))


def reason_not_to_compile(
    model: torch.nn.Module, ours: Container[torch.nn.Module] = frozenset()
) -> str | None:
    """Return the name of a module that is already compiled, with the reason. Return None if there is none.

    Modules in `ours` may be compiled.
    """
    for name, module in model.named_modules():
        if module in ours:
            continue
        where = f"its module {name!r}" if name else "the model"
        if isinstance(module, OptimizedModule):
            return f"{where} is a result of torch.compile"
        if module._compiled_call_impl is not None:
            return f"{where} is already compiled"
        if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
            return f"the forward of {where} is already compiled"
    return None
