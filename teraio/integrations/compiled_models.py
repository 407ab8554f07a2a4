"""The models of trainers that this package has compiled. In: a module and options. Out: the same module,
whose calls run compiled code, or the reason why it cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.eval_frame import OptimizedModule

from teraio.in_place import compile_in_place
from teraio.launch.trained_models import FirstCall

# The modules that this package has compiled, with their options.
COMPILED: WeakKeyDictionary[torch.nn.Module, Mapping[str, Any]] = WeakKeyDictionary()


def compile_and_note(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Compile the calls of this module with teraio, and note its options."""
    COMPILED[module] = dict(options)
    compile_in_place(module, options)


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
        # `teraio run` gives each trained module a FirstCall, which compiles nothing before the first call.
        if not isinstance(module._compiled_call_impl, FirstCall | None):
            return f"{where} is already compiled"
        if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
            return f"the forward of {where} is already compiled"
    return None
