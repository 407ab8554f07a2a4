"""Functions of torch that read a tensor without asking its class first: a weight that is away would be read
from an address that is not there. They are wrapped once per process, so that the guard is asked before. And
one that asks for no other reason than to go a slower way then, whose last digits are others.

tests/touch_list.py is how they were found: each of them ended the process.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pkgutil import iter_modules
from typing import Any

import torch
import torch._functorch.eager_transforms as _transforms
import torch._functorch.vmap as _vmap
import torch.jit._builtins as _script_builtins
import torch.overrides
import torch.utils.dlpack
from torch._C import _EnableTorchFunction
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.utils._device import _device_constructors

from .gradients import ACTIVE as gradients_of_engines
from .guard import BARE, active, touched

Function = Callable[..., Any]

# They read an argument of theirs; what functorch makes of it holds it, which the guard then sees.
PLAIN: tuple[tuple[Any, str], ...] = (
    (torch, "tensor"),
    (torch.Tensor, "new_tensor"),
    (_vmap, "_add_batch_dim"),
    (_transforms, "_wrap_for_grad"),
    (_transforms, "_wrap_functional_tensor"),
)
# What they return has the address for as long as it likes.
ADDRESS: tuple[tuple[Any, str], ...] = (
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
)
# In evaluation they call one function for the whole layer, if no argument has a class that wants to be asked.
WHOLE_LAYERS = frozenset({"torch.nn.modules.activation", "torch.nn.modules.transformer"})
SCRIPTS = ("ScriptFunction", "ScriptMethod")

_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    _keep_out_dynamo()
    # They have noted the functions themselves before they meet the wrapped ones: Dynamo, and
    # `with torch.device(...)`, which would no longer know `torch.tensor` as one that makes tensors.
    get_torch_obj_rule_map()
    TorchInGraphFunctionVariable._get_handlers()
    _device_constructors()
    for wrap, names in ((_plain, PLAIN), (_address, ADDRESS)):
        for owner, name in names:
            if (function := getattr(owner, name, None)) is not None:
                setattr(owner, name, wrap(function))
    _script_builtins._register_builtin(torch.tensor, "aten::tensor")
    torch.overrides.has_torch_function = _but_ours(torch.overrides.has_torch_function)
    _script_builtins._register_builtin(torch.overrides.has_torch_function, "aten::has_torch_function")
    for name in SCRIPTS:
        owner = getattr(torch._C, name)
        owner.__call__ = _all(owner.__call__)
    torch.autograd._engine_run_backward = _gradients(torch.autograd._engine_run_backward)
    torch.nn.Parameter.__new__ = _plain(torch.nn.Parameter.__new__)  # type: ignore[method-assign]
    torch.Tensor.__new__ = _plain(torch.Tensor.__new__)  # type: ignore[method-assign]


def _keep_out_dynamo() -> None:
    """Hooks of ours run in a backward that a compiled function calls: they are not to be compiled. What is
    wrapped here Dynamo goes through, as through what it wraps."""
    for module in iter_modules([os.path.dirname(__file__)]):
        if module.name != __name__.rpartition(".")[2]:
            trace_rules.add(f"{__package__}.{module.name}")


def _plain(function: Function) -> Function:
    @functools.wraps(function)
    def asks(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and _any_guarded((*args, *kwargs.values()), nested=False):
            return touched(function, args, kwargs)
        return function(*args, **kwargs)

    return asks


def _address(function: Function) -> Function:
    """Whose bytes it gives to others, by their address: they never move again."""
    asking = _plain(function)

    @functools.wraps(function)
    def asks(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = asking(tensor, *args, **kwargs)
        if (guard := active()) is not None and not kwargs.get("copy"):
            with torch._C.DisableTorchFunctionSubclass():
                guard.owner.gave_address(torch.Tensor.untyped_storage(tensor)._cdata)
        return result

    return asks


def _all(function: Function) -> Function:
    """The compiled code of a script is C++."""
    hashable = functools.partial(function)  # its method is not

    @functools.wraps(function)
    def asks(*args: Any, **kwargs: Any) -> Any:
        if _any_guarded((*args, *kwargs.values())):
            return touched(hashable, args, kwargs)
        return function(*args, **kwargs)

    return asks


def _gradients(function: Function) -> Function:
    """Of what is handed to a backward only the gradients are read; the leaves among its inputs stay away. Its
    hooks and its checkpoints are user code: the guard is asked there, also where the loss has a class of its
    own, for whose functions torch asks none."""

    def asking(outputs: Any, gradients: Any, args: Any, kwargs: Any) -> Any:
        with _EnableTorchFunction():
            return function(outputs, gradients, *args, **kwargs)

    @functools.wraps(function)
    def asks(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        engines = gradients_of_engines if active() is not None else []
        for each in engines:
            each.backward_begins(outputs)
        if _any_guarded(gradients):
            result = touched(lambda given: asking(outputs, given, args, kwargs), (gradients,), {})
        else:
            result = asking(outputs, gradients, args, kwargs)
        if len(args) > 1 and args[1]:  # create_graph
            for each in engines:
                each.graph_of_backward()
        return result

    for each in (asking, asks):  # Dynamo is not kept out of this file
        skip_code(each.__code__)
    return asks


def _but_ours(function: Function) -> Function:
    """That one function asks the guard, like any."""

    @functools.wraps(function)
    def asks(values: Iterable[Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return function(values)
        whole_layer = sys._getframe(1).f_globals.get("__name__") in WHOLE_LAYERS
        return function([value for value in values if type(value) not in BARE] if whole_layer else values)

    return asks


def _any_guarded(values: Iterable[Any], nested: bool = True) -> bool:
    for value in values:
        if type(value) in BARE or (nested and isinstance(value, list | tuple) and _any_guarded(value)):
            return True
    return False
