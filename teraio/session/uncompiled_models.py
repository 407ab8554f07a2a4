"""Which compiled models sent no graph to the backend, seen when an optimizer steps for the first time.

Dynamo may skip a frame and run it as plain Python: it does so with a frame that has a recurrent layer. Then
the backend is never called. So the first step of each optimizer compares the weights of compiled modules that
have gradients with the weights that programs had. What is missing is told, with Dynamo's reasons, and the
engine is opened for it: the weights, gradients and optimizer states are evicted as those of eager code are.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext, innermost_backend
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_pre_hook

from teraio.errors import UnsupportedError
from teraio.options import Settings, is_disabled
from teraio.runtime.ledger.adoption import SMALLEST_BYTES
from teraio.runtime.optimizer.hooks import refuse_shards
from teraio.session import session
from teraio.units import fmt_bytes, fmt_count

log = logging.getLogger("teraio")

REASONS = 3  # of Dynamo's that a message lists
PART = 0.5  # of a model's bytes: a model with less than this in no program is served without a word

_seen: WeakSet[torch.optim.Optimizer] = WeakSet()
_counted: dict[str, int] = {}  # reasons of Dynamo at the last look, and how often each had been given
_installed = False


@dataclass(frozen=True, slots=True)
class UncompiledModel:
    """A compiled model, and its trained weights that no program had."""

    model: str
    count: int
    size_bytes: int
    of_bytes: int
    weights: tuple[torch.Tensor, ...]
    options: Mapping[str, Any]  # that it was compiled with


def install(backend: Callable[..., Any]) -> None:
    """Register the look at the first step of each optimizer, once per process. It looks at models that
    `backend` compiled."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(torch.compiler.disable(partial(_warn_of_uncompiled_models, backend)))


def _warn_of_uncompiled_models(
    backend: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> None:
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    reasons = _newest_dynamo_reasons()  # also where nothing is missing: the next look is at another model
    if is_disabled():
        return
    weights = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    stepped = {id(p) for p in weights if p.nbytes >= SMALLEST_BYTES} - _ids_of_weights_in_programs()
    if not stepped:
        return
    if session.SESSION is not None:
        # What the look takes is not the user's.
        session.SESSION.engine.user.eager_memory.end_user_code_measure()
    missing = [
        m
        for module, options in _compiled_modules(backend)
        if (m := _uncompiled_part(module, stepped, options)) is not None
    ]
    if not missing:
        return
    refuse_shards(optimizer)
    parsed = Settings.parse({**session.GIVEN, **missing[0].options})
    told = _warning_text(missing, reasons)
    if parsed.on_fallback == "error":
        raise UnsupportedError(told)
    log.warning("teraio: %s", told)
    first = missing[0].weights[0]
    session.ensure_session(parsed, first.device)
    session.register_eager_weight(first)


def _ids_of_weights_in_programs() -> set[int]:
    """Return the ids of the tensors that the engine knows as weights of programs."""
    if session.SESSION is None:
        return set()
    records = session.SESSION.engine.known_tensors.records
    return {key for key, record in records.items() if record.kind == "weight"}


def _compiled_modules(backend: Callable[..., Any]) -> Iterator[tuple[torch.nn.Module, Mapping[str, Any]]]:
    """Yield the modules that this backend compiled, each with the options that it was given."""
    for each in gc.get_objects():
        if issubclass(type(each), OptimizedModule):
            module, called = each._orig_mod, each.dynamo_ctx
        elif issubclass(type(each), torch.nn.Module) and vars(each).get("_compiled_call_impl") is not None:
            module, called = each, _dynamo_wrapper_of(each._compiled_call_impl)
        else:
            continue
        wrapper: Any = innermost_backend(getattr(called, "callback", None))  # type: ignore[arg-type]
        if type(wrapper) is torch._TorchCompileWrapper and wrapper.compiler_fn is backend:
            yield module, wrapper.kwargs.get("options", {})


def _dynamo_wrapper_of(compiled: Any) -> Any:
    """Return Dynamo's context of a function that it has wrapped: the function closes over it."""
    cells = getattr(compiled, "__closure__", None) or ()
    contexts = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _TorchDynamoContext)]
    return contexts[0] if contexts else None


def _uncompiled_part(
    module: torch.nn.Module, stepped: set[int], options: Mapping[str, Any]
) -> UncompiledModel | None:
    """Return what of this model is stepped and was in no program, if that is most of it."""
    weights = [p for p in module.parameters() if p.requires_grad and p.nbytes >= SMALLEST_BYTES]
    left_out = tuple(p for p in weights if id(p) in stepped)
    of_bytes, size_bytes = (sum(p.nbytes for p in some) for some in (weights, left_out))
    if not left_out or size_bytes < PART * of_bytes:
        return None
    return UncompiledModel(type(module).__name__, len(left_out), size_bytes, of_bytes, left_out, options)


def _warning_text(missing: list[UncompiledModel], reasons: list[str]) -> str:
    models = ", ".join(
        f"{fmt_count(m.count, 'weight')} ({fmt_bytes(m.size_bytes)} of {fmt_bytes(m.of_bytes)}) of {m.model}"
        for m in missing[:REASONS]
    )
    why = f"Dynamo's reasons: {'; '.join(reasons)}" if reasons else "Dynamo gave no reason"
    return (
        f"in no compiled graph: {models}. {why}. That part runs as plain PyTorch: its weights, gradients and "
        f"optimizer states are evicted on demand, and its activations stay resident. "
        f"TORCH_LOGS=graph_breaks shows where; compile the layers that Dynamo accepts one by one"
    )


def _newest_dynamo_reasons() -> list[str]:
    """Return the first lines of Dynamo's reasons not to compile: what came since the last look, newest first.

    Dynamo counts for the process. It skips code that it skipped before without another reason, so older
    reasons follow.
    """
    counted = {str(t): n for kind in ("unimplemented", "graph_break") for t, n in counters[kind].items()}
    newest = list(reversed(counted))
    grown = [text for text in newest if counted[text] > _counted.get(text, 0)]
    _counted.clear()
    _counted.update(counted)
    lines = []
    for text in (*grown, *newest):
        line, at = text.splitlines()[0], _location_in_reason(text)
        lines.append(f"{line} ({at})" if at else line)
    return list(dict.fromkeys(lines))[:REASONS]


def _location_in_reason(text: str) -> str:
    """Return what Dynamo says it stopped at, such as the layer."""
    mark = "Developer debug context:"
    lines = [line.split(mark, 1)[1].strip() for line in text.splitlines() if mark in line]
    return lines[0][:80] if lines else ""
