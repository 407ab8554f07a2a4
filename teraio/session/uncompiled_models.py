"""A check for compiled models that sent no graph to the backend. It runs at the first step of each optimizer.

Dynamo may skip a frame and run it as plain Python, for example a frame with a recurrent layer. In this case
Dynamo never calls the backend. So the check looks for weights of compiled models that have a gradient but are
in no compiled program. If it finds such weights, it warns with Dynamo's reasons and starts the engine. The
engine then evicts these weights, their gradients and their optimizer states on demand, as for eager code.
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
from teraio.runtime.ledger.shards import local_tensor, refuse_weights_of_fsdp
from teraio.session import session
from teraio.units import fmt_bytes, fmt_count

log = logging.getLogger("teraio")

REASONS = 3  # number of Dynamo's reasons, and of models, that a message lists
PART = 0.5  # warn only if at least this part of a model's bytes is in no program

_seen: WeakSet[torch.optim.Optimizer] = WeakSet()
_counted: dict[str, int] = {}  # Dynamo's reasons for not compiling -> their counts at the last check
_installed = False


@dataclass(frozen=True, slots=True)
class UncompiledModel:
    """A compiled model, and its trained weights that no compiled program contains."""

    model: str
    count: int
    size_bytes: int
    of_bytes: int
    weights: tuple[torch.Tensor, ...]
    options: Mapping[str, Any]  # the options given to torch.compile for this model


def install(backend: Callable[..., Any]) -> None:
    """Register the check once per process. It covers the models that `backend` compiles."""
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
    reasons = _newest_dynamo_reasons()  # call this first, so that the next check finds only newer reasons
    if is_disabled():
        return
    weights = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    in_programs = _ids_of_weights_in_programs()
    stepped = {
        id(p) for p in weights if (t := local_tensor(p)).nbytes >= SMALLEST_BYTES and id(t) not in in_programs
    }
    if not stepped:
        return
    if session.SESSION is not None:
        # Memory that this check allocates must not count as memory of user code.
        session.SESSION.engine.user.eager_memory.end_user_code_measure()
    missing = [
        m
        for module, options in _compiled_modules(backend)
        if (m := _uncompiled_part(module, stepped, options)) is not None
    ]
    if not missing:
        return
    refuse_weights_of_fsdp(p for group in optimizer.param_groups for p in group["params"])
    parsed = Settings.parse({**session.GIVEN, **missing[0].options})
    text = _warning_text(missing, reasons)
    if parsed.on_fallback == "error":
        raise UnsupportedError(text)
    log.warning("teraio: %s", text)
    first = missing[0].weights[0]
    session.ensure_session(parsed, first.device)
    session.register_eager_weight(first)


def _ids_of_weights_in_programs() -> set[int]:
    """Return the ids of the weights that compiled programs contain."""
    if session.SESSION is None:
        return set()
    records = session.SESSION.engine.known_tensors.records
    return {key for key, record in records.items() if record.kind == "weight"}


def _compiled_modules(backend: Callable[..., Any]) -> Iterator[tuple[torch.nn.Module, Mapping[str, Any]]]:
    """Yield the modules that this backend compiled, each with its options."""
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
    """Return the Dynamo object in the closure of a compiled function, or None if there is none."""
    function = getattr(compiled, "compiled", compiled)  # teraio.in_place puts an object around the function
    cells = getattr(function, "__closure__", None) or ()
    contexts = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _TorchDynamoContext)]
    return contexts[0] if contexts else None


def _uncompiled_part(
    module: torch.nn.Module, stepped: set[int], options: Mapping[str, Any]
) -> UncompiledModel | None:
    """Return the model's weights that the optimizer steps, but that no compiled program contains.

    Return None if they have less than the part `PART` of the model's bytes.
    """
    weights = [p for p in module.parameters() if p.requires_grad and local_tensor(p).nbytes >= SMALLEST_BYTES]
    left_out = tuple(p for p in weights if id(p) in stepped)
    of_bytes, size_bytes = (sum(local_tensor(p).nbytes for p in some) for some in (weights, left_out))
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
        f"optimizer states are evicted on demand, and its activations are kept resident. "
        f"TORCH_LOGS=graph_breaks shows where; compile the layers that Dynamo accepts one by one"
    )


def _newest_dynamo_reasons() -> list[str]:
    """Return Dynamo's reasons for not compiling, one line each. New reasons since the last check come first.

    Dynamo counts reasons per process. If it skips the same code again, it does not count a reason again. So
    the list also contains older reasons.
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
    """Return the place where Dynamo stopped, such as a layer, from the text of a reason. Return "" without a
    place.
    """
    mark = "Developer debug context:"
    lines = [line.split(mark, 1)[1].strip() for line in text.splitlines() if mark in line]
    return lines[0][:80] if lines else ""
