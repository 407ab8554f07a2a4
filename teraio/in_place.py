"""Compilation in place. In: a module and options. Out: the same module, whose calls run compiled code.

Torch calls the attribute `_compiled_call_impl` of a module instead of the module's own code, if it is set.
The keys of the state dict do not change, and copies of the module are not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

PLACE = "_compiled_call_impl"


def compile_in_place(
    module: torch.nn.Module,
    options: Mapping[str, Any] | None = None,
    compile_function: Callable[..., Any] | None = None,
) -> None:
    """Compile the calls of this module with teraio. `compile_function` replaces `torch.compile`.

    `module.compile()` has no effect on a class of torch.nn, because Dynamo never begins a trace in a function
    of torch. So for such a module, the trace begins in a function that Dynamo does not skip.
    """
    from torch._dynamo import external_utils, trace_rules

    call = module._call_impl
    if trace_rules.check(module.forward):
        call = external_utils.wrap_inline(call)
    compiled = (compile_function or torch.compile)(
        call, backend="teraio", options=dict(options or {}) or None
    )
    vars(module)[PLACE] = compiled
