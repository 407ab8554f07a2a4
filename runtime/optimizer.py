"""The optimizer's step as part of the step: global hooks see every optimizer, the user's loop does not
change."""

from __future__ import annotations

from typing import Any

import torch
import torch.optim.optimizer as _torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import engine as _engine
from .guard import GuardedParameter

_installed = False


def install() -> None:
    """Once per process; without an engine the hooks do nothing."""
    global _installed
    if not _installed:
        # A compiled optimizer runs them between its graphs: Dynamo is not to trace the engine.
        register_optimizer_step_pre_hook(torch.compiler.disable(_before))
        register_optimizer_step_post_hook(torch.compiler.disable(_after))
        if isinstance(supported := getattr(_torch_optimizer, "_foreach_supported_types", None), list):
            supported.append(
                GuardedParameter
            )  # which of its implementations an optimizer takes does not change
        _installed = True


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A parameter without a gradient is left alone by its optimizer, unless a closure will make gradients."""
    if _engine.ENGINE is not None:
        closure = bool(args[1:] or kwargs.get("closure"))
        stepped = [p for p in _parameters(optimizer) if closure or p.grad is not None]
        _engine.ENGINE.at_optimizer(stepped)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    engine = _engine.ENGINE
    if engine is None:
        return
    for number, parameter in enumerate(_parameters(optimizer)):
        if parameter.grad is not None:
            engine.count(parameter.grad, f"grad.{number}", "grad")
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                engine.count(value, f"{name}.{number}", "state")
    engine.after_optimizer()
