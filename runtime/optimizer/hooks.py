"""Global hooks on the steps of all optimizers. With these hooks the engine sees every step, without a change
of the user's loop."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from teraio.errors import UnsupportedError

from ..engine import engine as _engine
from .buckets import is_stand_in, make_stand_in
from .step_call import OptimizerCall, is_step_uncompiled
from .strategy import TRYING, Strategy

_installed = False
_KNOWN: WeakKeyDictionary[torch.optim.Optimizer, Strategy] = WeakKeyDictionary()
_CALLS: list[OptimizerCall] = []  # the running call, if any; a step inside a step or in a trial has no call


def install() -> None:
    """Install the hooks, only once per process. Without an engine the hooks do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    # A compiled optimizer runs the hooks between its graphs. Dynamo must not trace the engine's code there.
    register_optimizer_step_pre_hook(torch.compiler.disable(_begin_optimizer_call))
    register_optimizer_step_post_hook(torch.compiler.disable(_end_optimizer_call))


def is_optimizer_update_running() -> bool:
    """Return whether an optimizer's update is running. A function that is compiled during an update reads
    only its arguments."""
    return bool(TRYING) or any(call.is_update_running for call in _CALLS)


def _strategy_of(optimizer: torch.optim.Optimizer) -> Strategy:
    about = _KNOWN.get(optimizer)
    if about is None:
        refuse_shards(optimizer)
        about = _KNOWN[optimizer] = Strategy(len(_KNOWN))
    about.run_trial_if_changed(optimizer)
    return about


Wrapped = TypeVar("Wrapped", bound=torch.optim.Optimizer)


def wrap(optimizer: Wrapped, *, whole: bool = False) -> Wrapped:
    """Check the optimizer and return it. Raise UnsupportedError if the optimizer must step all of its
    parameters together.

    With `whole`, such an optimizer raises no error. After `wrap`, a step raises the same error if the user
    has changed the groups so that buckets are impossible. Without `wrap`, such a step only logs a warning.
    """
    install()
    about = _strategy_of(optimizer)
    about.require_buckets(not whole)
    _refuse_whole_step(optimizer, about)
    return optimizer


def refuse_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError if a parameter is divided among processes."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    kind = next((type(p).__name__ for p in parameters if hasattr(p, "device_mesh")), None)
    if kind is not None:
        raise UnsupportedError(
            f"{type(optimizer).__name__} steps parameters of type {kind} (fully_shard, tensor parallelism): "
            f"their bytes move between processes, which teraio cannot observe. Use DistributedDataParallel, "
            f"or compile this model with another backend"
        )


def _refuse_whole_step(optimizer: torch.optim.Optimizer, about: Strategy) -> None:
    if about.in_buckets and about.seen.reason is not None:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be stepped a few parameters at a time ({about.seen.reason}): "
            f"all weights, gradients and states would be in memory at once. wrap(optimizer, whole=True) "
            f"allows that. AdamW and other optimizers that update each parameter by itself need less memory"
        )


def _begin_optimizer_call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Make the step run on a stand-in for its optimizer. The groups of the stand-in come bucket by bucket."""
    engine = _engine.ENGINE
    if engine is None or TRYING or is_stand_in(optimizer):
        return None
    _CALLS.clear()  # removes a call that an exception ended
    with engine.lock:
        engine.user.eager_memory.end_user_code_measure()  # so that the memory of the trial is not measured
    about = _strategy_of(optimizer)
    _refuse_whole_step(optimizer, about)
    closure = any(given is not None for given in (*args[1:], kwargs.get("closure")))
    call = OptimizerCall(engine, optimizer, about, closure)
    _CALLS.append(call)
    if about.seen.reason is None:
        reason = _reason_to_run_whole(optimizer)
        if reason is None:
            return (make_stand_in(optimizer, call.iterate_buckets), *args[1:]), kwargs
        about.warn_of_whole_step(optimizer, reason)
    call.open_all_as_one_bucket()
    return None


def _reason_to_run_whole(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the reason why this step must run whole, although its optimizer can be stepped in buckets.
    Return None without such a reason."""
    if not is_step_uncompiled(optimizer):
        return "its step is compiled"
    states = [id(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return "two of them share a state" if len({*states}) < len(states) else None


def _end_optimizer_call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if TRYING or is_stand_in(optimizer) or not _CALLS:
        return
    call = _CALLS.pop()
    if _engine.ENGINE is call.engine:
        call.end()
