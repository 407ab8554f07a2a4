"""The `torch.compile` backend: programs get slots, the engine gets a plan.

torch.compile(model, backend="teraio", options={"memory": "20GiB"})

captured graph -> AOTAutograd -> inner program with slots (passes/) -> runs, calling the engine (runtime/)

What then happens between the engine, the measured steps and the planner is in session.py.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch._functorch.config as functorch_config
from torch._dynamo import eval_frame
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch.utils._pytree import tree_leaves

from teraio.errors import TeraioError, UnsupportedError
from teraio.formats.schedule import ProgramKind, listing
from teraio.options import Settings, disabled
from teraio.passes import selftest
from teraio.progress import stage
from teraio.runtime.engine import engine
from teraio.runtime.ledger.adoption import foreign_weight, weights_of_compiled_modules
from teraio.runtime.step.program import Program
from teraio.session import session, torch_versions, uncompiled_models
from teraio.session.recomputation import compiled_function
from teraio.session.session import (
    all_made_again,
    count_as_ours,
    graph_of_ours,
    loaded_graph,
    made_again,
    patch_torch,
    reset,
    start,
)

log = logging.getLogger("teraio")


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(backend="teraio")` calls for every captured graph."""
    try:
        with graph_of_ours():
            return _compile(gm, example_inputs, {**(options or {}), **({"mode": mode} if mode else {})})
    except TeraioError as error:
        _raise_as_it_is(error)


def _compile(
    gm: torch.fx.GraphModule, example_inputs: list[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    parsed = Settings.parse({**session.GIVEN, **options})
    inner = parsed.inner
    hear_of_resets()
    on = _device_of(gm, example_inputs)
    if not disabled():
        inner = torch_versions.check(
            inner, torch.__version__, str(on), selftest.run_apart, parsed.on_fallback
        )
    # Imported after the check: in a torch that is not known, this may fail. Inductor's is its own matter.
    from teraio.passes.capture import aot
    from teraio.passes.fx import program as fx

    settings: dict[str, Any] = {}
    if inner != "eager":
        from teraio.passes.inductor import codegen, partition
        from teraio.passes.inductor import options as inductor_options

        settings = inductor_options.settings(parsed.mode, dict(parsed.inductor))
    elif parsed.inner != "eager" and (parsed.mode or parsed.inductor):
        log.warning("teraio: options 'mode' and 'inductor' have no effect, because inner='eager' is used")
    labels = aot.placeholder_names(gm)
    if disabled():
        if inner == "eager":
            return fx.compiler(lambda graph, kind: None)(gm, example_inputs)
        return codegen.compile_program(gm, example_inputs, notice=None, settings=settings)
    if inner != "eager":
        inductor_options.refuse_unfit(settings, parsed.mode)
        partition.refuse_other(parsed.recompute == "auto")
    start(parsed, on)
    count_as_ours()
    _adopt(labels, example_inputs)
    if inner == "eager":
        # AOTAutograd's own cache would hand back a compiled graph without ever calling us.
        with functorch_config.patch(enable_autograd_cache=False):
            slotted = fx.compiler(lambda g, kind: _slot_eager(g, kind, labels), engine.guarded, made_again)
            return _telling(slotted(gm, example_inputs))
    with stage(f"compiling {compiled_function()}", say=log.info):
        compiled = codegen.compile_program(
            gm,
            example_inputs,
            log.warning,
            lambda: _loads(labels),
            guard=True,
            settings=settings,
            again=(made_again, all_made_again()),
        )
    return _telling(compiled)


def _telling(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph that tells the engine whether its caller wants gradients: AOTAutograd runs what has no
    backward without, whoever calls it."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        if (running := engine.ENGINE) is not None:
            running.tracker.grad_mode = torch.is_grad_enabled()
        return compiled(*args)

    return call


def _device_of(gm: torch.fx.GraphModule, inputs: list[Any]) -> torch.device:
    """Return the device that a graph runs on. A tensor of one element may lie in RAM wherever that is, so a
    graph of such ones, or of none, is one of the device that the process has."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    on = {x.device for x in tensors if x.numel() > 1 or x.device.type != "cpu"}
    if not on and session.SESSION is not None:
        return session.SESSION.device.device
    others = {device.type for device in on} - {"cpu", "cuda", "meta"}
    if others and not disabled():
        names = ", ".join(sorted(others))
        raise UnsupportedError(f"a graph on {names}: teraio moves tensors of cuda and cpu")
    gpus = [device for device in on if device.type == "cuda"]
    if not gpus:
        return torch.device("cpu")
    gpus = sorted({*gpus, *_gpus_within(gm)}, key=str)
    if len(gpus) > 1 and not disabled():
        raise UnsupportedError(
            f"a graph on {' and '.join(map(str, gpus))}: one process keeps the memory of one device within a "
            f"budget. Put the model on one device, or compile the layers of one device with backend='teraio' "
            f"and leave the others to another backend"
        )
    return gpus[0]


def _gpus_within(gm: torch.fx.GraphModule) -> set[torch.device]:
    """Return the GPUs of what the graph's nodes make."""
    values = tree_leaves([node.meta.get("example_value") for node in gm.graph.nodes])
    return {value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda}


def _raise_as_it_is(error: TeraioError) -> NoReturn:
    """Dynamo wraps what a backend raises in an exception of its own, unless it is such a one already: then
    the user gets it, without Dynamo's frames. So the error becomes both; its name and its message stay."""
    kind = type(error)
    as_it_was = {"__str__": lambda self: str(error), "__reduce__": lambda self: error.__reduce__()}
    both = type(kind.__name__, (kind, BackendCompilerFailed), {**as_it_was, "__module__": kind.__module__})
    raised = both.__new__(both, *error.args)
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=sys._getframe())
    raised.backend_name, raised.inner_exception = "teraio", error
    raised.__dict__.update(error.__dict__)
    raise raised.with_traceback(error.__traceback__) from error.__cause__


def _reset() -> None:
    """`torch._dynamo.reset()` forgets all compiled models; so do we."""
    reset()


backend.reset = _reset  # type: ignore[attr-defined]


def hear_of_resets() -> None:
    """Dynamo tells the backends of all `torch.compile` calls since its last reset; of a model that was
    compiled before that and is used again, it would not."""
    registered = getattr(eval_frame, "cached_backends", None)
    if registered is not None:
        registered.setdefault(id(backend), backend)


def _adopt(labels: tuple[str, ...], inputs: list[Any]) -> None:
    """Before the first step: weights that files, numpy or other libraries own become torch's."""
    assert engine.ENGINE is not None
    stuck = engine.ENGINE.unresizable
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    foreign = [
        (name, t) for name, t in zip(labels, tensors) if foreign_weight(t) and name not in stuck.refused
    ]
    if foreign:
        blocks = [(name, t) for name, t in weights_of_compiled_modules() if foreign_weight(t)]
        stuck.adopt([*foreign, *blocks])


def _slot_eager(graph: torch.fx.GraphModule, kind: ProgramKind, labels: tuple[str, ...]) -> None:
    from teraio.passes.fx import program as fx

    schedule, connect = fx.insert_slots(graph, kind)
    with _loads(labels):
        connect(engine.program(schedule.text))


def _loads(labels: tuple[str, ...]) -> AbstractContextManager[list[Program]]:
    """Return a block in which each program that is loaded is told what the user calls its arguments."""

    def label(program: Program) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("teraio: %s", listing(program.schedule))
        if program.schedule.kind != "backward":
            program.name_arguments(labels)
            loaded_graph(program.schedule.graph)

    return engine.programs_loaded(label)


# `torch.compile` imports this module when it is called, which is before Dynamo traces the model.
if torch_versions.tested(torch.__version__):
    uncompiled_models.install(
        backend
    )  # its hook runs before the runtime's: it may open the engine that those ask for
    patch_torch()
