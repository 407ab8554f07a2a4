"""The optimizer's step as part of the step: global hooks see every optimizer, the user's loop does not
change."""

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
_CALLS: list[OptimizerCall] = []  # the one that runs; a step inside a step, or on trial, is not ours


def install() -> None:
    """Once per process; without an engine the hooks do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    # A compiled optimizer runs them between its graphs: Dynamo is not to trace the engine.
    register_optimizer_step_pre_hook(torch.compiler.disable(_begin_optimizer_call))
    register_optimizer_step_post_hook(torch.compiler.disable(_end_optimizer_call))


def is_optimizer_update_running() -> bool:
    """Whether an optimizer's update runs: what is compiled for it reads what it is given, and no more."""
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
    """Returns the optimizer, or refuses now one that must step all of its parameters at once, unless `whole`
    allows it. Without this it is found out at the first step, and a warning; and whenever its groups make it
    one, an error."""
    install()
    about = _strategy_of(optimizer)
    about.in_buckets = not whole
    _refuse_whole_step(optimizer, about)
    return optimizer


def refuse_shards(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError if a parameter is divided among processes."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    kind = next((type(p).__name__ for p in parameters if hasattr(p, "device_mesh")), None)
    if kind is not None:
        raise UnsupportedError(
            f"{type(optimizer).__name__} steps parameters of type {kind} (fully_shard, tensor parallelism), "
            f"whose bytes move between processes behind teraio's back. DistributedDataParallel works; or "
            f"compile this model with another backend"
        )


def _refuse_whole_step(optimizer: torch.optim.Optimizer, about: Strategy) -> None:
    if about.in_buckets and about.seen.reason is not None:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be stepped a few parameters at a time ({about.seen.reason}): "
            f"all weights, gradients and states would be in memory at once. wrap(optimizer, whole=True) "
            f"allows it; AdamW and others that update each parameter by itself need no such room"
        )


def _begin_optimizer_call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Gives the step a stand-in for its optimizer, whose groups come bucket by bucket."""
    engine = _engine.ENGINE
    if engine is None or TRYING or is_stand_in(optimizer):
        return None
    _CALLS.clear()  # one that an exception ended
    with engine.lock:
        engine.user.eager_memory.end_user_code_measure()  # what the trial takes is not the user's
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
    """Why this step runs whole, of an optimizer that could be stepped in buckets."""
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
