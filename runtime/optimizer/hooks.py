"""Global hooks on the steps of all optimizers. By these hooks the engine takes part in every step, and the
user's training loop needs no change."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from teraio.errors import UnsupportedError
from teraio.ranks import failures

from ..engine import engine as _engine
from ..ledger.shards import refuse_weights_of_fsdp, warn_of_unsharded_weights
from .buckets import is_stand_in, make_stand_in
from .step_call import OptimizerCall, is_step_uncompiled
from .strategy import TRYING, Strategy

_installed = False
_KNOWN: WeakKeyDictionary[torch.optim.Optimizer, Strategy] = WeakKeyDictionary()
_BEGUN: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers whose step began when an engine existed
_CALLS: list[OptimizerCall] = []  # the running step, if any; steps on stand-ins and in trials are not listed


def install() -> None:
    """Install the hooks. A second call does nothing. Without an engine, the hooks do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    # Dynamo must not trace the engine's code. If an optimizer is compiled, its hooks run between its graphs.
    register_optimizer_step_pre_hook(torch.compiler.disable(_begin_optimizer_call))
    register_optimizer_step_post_hook(torch.compiler.disable(_end_optimizer_call))


def is_optimizer_update_running() -> bool:
    """Return whether an optimizer's update is running. During an update, a compiled function reads only its
    arguments, so the engine need not keep other weights resident for the function."""
    return bool(TRYING) or any(call.is_update_running for call in _CALLS)


def _strategy_of(optimizer: torch.optim.Optimizer) -> Strategy:
    about = _KNOWN.get(optimizer)
    if about is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        refuse_weights_of_fsdp(parameters)
        warn_of_unsharded_weights(type(optimizer).__name__, parameters)
        about = _KNOWN[optimizer] = Strategy(len(_KNOWN))
    about.run_trial_if_changed(optimizer)
    return about


Wrapped = TypeVar("Wrapped", bound=torch.optim.Optimizer)


def wrap(optimizer: Wrapped, *, whole: bool = False) -> Wrapped:
    """Check the optimizer and return it. Raise UnsupportedError if the optimizer can only step all of its
    parameters together. With `whole=True`, accept such an optimizer.

    The user may later change the groups so that the optimizer can no longer step in buckets. Then its next
    step raises the same error. An optimizer that was never passed to `wrap`, or that was passed with
    `whole=True`, only logs a warning.
    """
    install()
    about = _strategy_of(optimizer)
    about.require_buckets(not whole)
    _refuse_whole_step(optimizer, about)
    return optimizer


def _refuse_whole_step(optimizer: torch.optim.Optimizer, about: Strategy) -> None:
    if about.in_buckets and about.seen.reason is not None:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be stepped a few parameters at a time ({about.seen.reason}): "
            f"all weights, gradients and states would be in memory at once. wrap(optimizer, whole=True) "
            f"allows that. AdamW and other optimizers that update each parameter by itself need less memory"
        )


def _begin_optimizer_call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Begin an optimizer's step. Torch calls this hook before the step. If buckets are possible, the step's
    code runs on a stand-in, whose groups yield one bucket at a time. Otherwise the step has one bucket of all
    parameters."""
    engine = _engine.ENGINE
    if engine is None or TRYING or is_stand_in(optimizer):
        return None
    _BEGUN.add(optimizer)
    failures.note_collectives()
    failures.raise_if_rank_failed()
    with failures.reporting():
        return _begin_call(engine, optimizer, args, kwargs)


def _begin_call(
    engine: _engine.Engine, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    _CALLS.clear()  # remove a step that ended with an exception
    with engine.lock:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        engine.late.settle_parameters(parameters, "the next step of the optimizer")
        # End the measurement first, so that memory of the trial does not count as memory of user code.
        engine.user.eager_memory.end_user_code_measure()
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
    """Return the reason why this step must step all parameters together, although the optimizer passed its
    trial. Return None if the step may run in buckets."""
    if not is_step_uncompiled(optimizer):
        return "its step is compiled"
    states = [id(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return "two of them share a state" if len({*states}) < len(states) else None


def _end_optimizer_call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """End an optimizer's step. Torch calls this hook after the step."""
    engine = _engine.ENGINE
    if TRYING or engine is None or is_stand_in(optimizer):
        return
    if optimizer not in _BEGUN:
        # The step's closure called the first compiled program, so the engine is younger than the step.
        engine.finish_optimizer_step()
        return
    _BEGUN.discard(optimizer)
    if not _CALLS:
        return
    call = _CALLS.pop()
    if engine is call.engine:
        with failures.reporting():
            call.end()
        failures.cancel()
