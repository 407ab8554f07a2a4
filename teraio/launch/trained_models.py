"""The models that a script trains and does not compile itself. teraio compiles each of them in place.

    optimizer = AdamW(model.parameters())    each module that contains one of these weights gets a FirstCall
    model(batch)                             the outermost module with a FirstCall is compiled, then called

Torch calls the attribute `_compiled_call_impl` of a module instead of the module's own code, if it is set.
`Module.compile` sets this attribute, and a FirstCall is put in the same place. So nothing else about the
module changes: not its class, its name, the keys of its state dict, or its pickle.

A part of a compiled module keeps its FirstCall. Dynamo traces through it. If Dynamo cannot trace some code of
the module, this code runs as plain Python and calls parts. Dynamo never begins a trace in a class of
torch.nn, so a layer of `nn.TransformerDecoder` would run as plain Python, too. Its FirstCall compiles it.

teraio does not compile a module if the script compiles the module itself, or one of its submodules.

A script may update weights itself, without an optimizer of torch. Its first backward then shows which weights
it trains, so its models are compiled at their next calls.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.optim import Optimizer

from teraio.in_place import PLACE, OwnCall, compile_in_place, put_call
from teraio.launch import run_lines

# Modules of these packages wrap a model. The wrapped model is compiled, not the wrapper.
WRAPPERS = ("torch.nn.parallel.", "torch.distributed.", "torch._dynamo.", "torch.jit.", "deepspeed.")

BACKWARDS = 3  # number of backwards that look for trained models


class FirstCall(OwnCall):
    """The call of a trained module, until the first call in which gradients are enabled."""

    __slots__ = ("module",)

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        # A traced, scripted or exported call must not compile. Without gradients, no training has begun.
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not torch.is_grad_enabled():
            return module._call_impl(*args, **kwargs)
        if callable(get_eval_frame_callback()):
            # Compiled code called this code, so Dynamo would trace teraio's functions.
            torch.compiler.disable(MODELS.compile_at_first_call)(module)
        elif module in MODELS.parts:
            # User code calls a part of a compiled module, for example where it has disabled the compiler.
            return module._call_impl(*args, **kwargs)
        else:
            MODELS.compile_at_first_call(module)
        return module(*args, **kwargs)


class TrainedModels:
    """The trained modules of this process: those that teraio compiled, and those that the script compiled."""

    def __init__(self) -> None:
        self.compile: Callable[..., Any] = torch.compile
        self.compiled: WeakSet[torch.nn.Module] = WeakSet()
        self.parts: WeakSet[torch.nn.Module] = WeakSet()  # submodules of modules in `compiled`
        self.by_script: WeakSet[torch.nn.Module] = WeakSet()  # with the submodules of these modules
        self.backwards_to_see = BACKWARDS  # 0: the trained weights are known

    def compile_with(self, function: Callable[..., Any]) -> None:
        """Compile models with this function: torch's own `torch.compile`."""
        self.compile = function

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Put a FirstCall into each module that contains a weight of the optimizer."""
        self.backwards_to_see = 0
        self._note_weights({id(p) for group in optimizer.param_groups for p in group["params"]})

    def note_gradients(self) -> None:
        """Put a FirstCall into each module that contains a weight with a gradient."""
        self.backwards_to_see -= 1
        weights = (p for module in _all_modules() for p in module._parameters.values() if p is not None)
        if trained := {id(p) for p in weights if p.grad is not None}:
            self.backwards_to_see = 0
            if self._note_weights(trained):
                run_lines.say_no_optimizer()

    def _note_weights(self, trained: set[int]) -> bool:
        """Put a FirstCall into each module that contains one of these weights. Return whether one does."""
        found = False
        run_lines.register_end_line()
        holds = functools.partial(_holds_weight, trained, {})
        for module in _all_modules():
            # A part that was traced without a FirstCall gets none, because Dynamo would trace it again.
            known = module in self.by_script or module in self.parts or vars(module).get(PLACE) is not None
            if not known and not _is_wrapper(module) and holds(module):
                put_call(module, FirstCall(module))
                found = True
        return found

    def leave_to_script(self, module: torch.nn.Module) -> None:
        """Note that the script compiles this module."""
        self.by_script.update(module.modules())
        for part in module.modules():
            _remove_first_call(part)

    def compile_at_first_call(self, module: torch.nn.Module) -> None:
        """Compile the module in place. If the script has compiled a part of it, or has replaced its
        `forward` by a trainer's function, leave the compilation to its submodules."""
        _remove_first_call(module)
        if _has_trainers_forward(module) or any(part in self.by_script for part in module.modules()):
            return
        from torch._dynamo.eval_frame import skip_code

        from teraio.backend import register_for_dynamo_resets

        register_for_dynamo_resets()
        # All FirstCalls share this code. Dynamo must not compile it for each module.
        skip_code(FirstCall.__call__.__code__)
        compile_in_place(module, compile_function=self.compile)
        self.compiled.add(module)
        self.parts.update(part for part in module.modules() if part is not module)
        run_lines.say_compiled(module)


def _has_trainers_forward(module: torch.nn.Module) -> bool:
    """Return True if Lightning has put `training_step` in the place of `forward`, so that a wrapper calls it.
    Dynamo cannot trace `training_step`, because `self.log` inspects its frames.
    """
    owner = getattr(vars(module).get("forward"), "__module__", None) or ""
    return owner.partition(".")[0] in ("lightning", "pytorch_lightning")


def _remove_first_call(module: torch.nn.Module) -> None:
    if isinstance(vars(module).get(PLACE), FirstCall):
        del vars(module)[PLACE]


def _all_modules() -> Iterator[torch.nn.Module]:
    """Yield all modules of this process. An object whose class only claims to be a module does not count."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.nn.Module) and "_modules" in vars(each):
            yield each


def _is_wrapper(module: torch.nn.Module) -> bool:
    return any(f"{kind.__module__}.".startswith(WRAPPERS) for kind in type(module).__mro__)


def _holds_weight(weights: set[int], known: dict[int, bool], module: torch.nn.Module) -> bool:
    """Return True if the module or a submodule has one of these weights. `known` holds earlier answers."""
    if (answer := known.get(id(module))) is not None:
        return answer
    known[id(module)] = False  # ends the search in a module that contains itself
    own = any(id(p) in weights for p in module._parameters.values())
    known[id(module)] = own or any(
        _holds_weight(weights, known, part) for part in module._modules.values() if part is not None
    )
    return known[id(module)]


MODELS = TrainedModels()


def watch_optimizers() -> None:
    """Wrap the constructor of optimizers, and their method that adds weights."""
    construct, add = Optimizer.__init__, Optimizer.add_param_group
    constructing = set[int]()  # ids of optimizers; the constructor adds each group of weights

    @functools.wraps(construct)
    def construct_and_note(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        constructing.add(id(self))
        try:
            construct(self, *args, **kwargs)
        finally:
            constructing.discard(id(self))
        MODELS.note_optimizer(self)

    @functools.wraps(add)
    def add_and_note(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        if id(self) not in constructing:
            MODELS.note_optimizer(self)

    Optimizer.__init__ = construct_and_note  # type: ignore[method-assign]
    Optimizer.add_param_group = add_and_note  # type: ignore[method-assign]


def watch_first_backward() -> None:
    """Wrap the function behind `Tensor.backward`. Its first calls look for trained models, unless the script
    has made an optimizer before.
    """
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def backward_and_note(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if MODELS.backwards_to_see and not torch.compiler.is_compiling():
            MODELS.note_gradients()

    torch.autograd.backward = backward_and_note
