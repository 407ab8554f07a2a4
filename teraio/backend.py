"""The `torch.compile` backend. It compiles a captured graph to a program with slots, the points at which the
engine evicts and fetches tensors.

torch.compile(model, backend="teraio", options={"memory": "20GiB"})

captured graph -> AOTAutograd -> inner program with slots (passes/) -> runs, calling the engine (runtime/)

teraio/session makes plans from measured steps of these programs.
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
from teraio.formats.schedule import ProgramKind, schedule_listing
from teraio.options import Settings, is_disabled
from teraio.passes import selftest
from teraio.progress import show_stage
from teraio.ranks import failures
from teraio.runtime.engine import engine
from teraio.runtime.ledger.adoption import is_unresizable_weight, weights_of_compiled_modules
from teraio.runtime.ledger.shards import (
    all_sharded_weights,
    is_shard,
    local_tensor,
    refuse_weights_of_fsdp,
    warn_of_unsharded_weights,
)
from teraio.runtime.step.program import Program
from teraio.session import session, torch_versions, uncompiled_models
from teraio.session.recomputation import describe_compiling_function
from teraio.session.session import (
    count_graph_as_ours,
    ensure_session,
    nodes_to_recompute,
    note_loaded_program,
    patch_torch,
    recompute_cache_key,
    reset,
    uncount_graph_on_error,
)

log = logging.getLogger("teraio")


def backend(
    gm: torch.fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph. `torch.compile(backend="teraio")` calls this for every graph."""
    failures.cancel()  # this rank goes on
    try:
        with failures.reporting(), uncount_graph_on_error():
            return _compile_graph(gm, example_inputs, {**(options or {}), **({"mode": mode} if mode else {})})
    except TeraioError as error:
        _raise_unwrapped(error)


def _compile_graph(
    gm: torch.fx.GraphModule, example_inputs: list[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    parsed = Settings.parse({**session.GIVEN, **options})
    inner = parsed.inner
    register_for_dynamo_resets()
    on = _device_of_graph(gm, example_inputs)
    if not is_disabled():
        inner = torch_versions.choose_inner_program(
            inner, torch.__version__, str(on), selftest.run_selftest_in_subprocess, parsed.on_fallback
        )
    # With an untested torch, these imports may fail. So the check of the torch version runs first. Inductor
    # is imported only if the check has chosen Inductor.
    from teraio.passes.capture import aot
    from teraio.passes.fx import program as fx

    settings: dict[str, Any] = {}
    if inner != "eager":
        from teraio.passes.inductor import codegen, partition
        from teraio.passes.inductor import options as inductor_options

        settings = inductor_options.merge_checked_settings(parsed.mode, dict(parsed.inductor))
    elif parsed.inner != "eager" and (parsed.mode or parsed.inductor):
        log.warning("teraio: options 'mode' and 'inductor' have no effect, because inner='eager' is used")
    labels = aot.weight_and_buffer_names(gm)
    if is_disabled():
        if inner == "eager":
            return fx.make_aot_backend(lambda graph, kind: None)(gm, example_inputs)
        return codegen.compile_program(gm, example_inputs, notice=None, settings=settings)
    if inner != "eager":
        inductor_options.refuse_unfit_settings(settings, parsed.mode)
        partition.refuse_other_partitioner(parsed.recompute == "auto")
    refuse_weights_of_fsdp(example_inputs)
    warn_of_unsharded_weights(describe_compiling_function(), example_inputs)
    if any(is_shard(value) for value in example_inputs):
        failures.take_part()
    ensure_session(parsed, on)
    count_graph_as_ours()
    _copy_foreign_weights(labels, example_inputs)
    _note_sharded_weights(example_inputs)
    with show_stage(f"compiling {describe_compiling_function()}", say=log.info):
        if inner == "eager":
            slotted = fx.make_aot_backend(
                lambda g, kind: _insert_eager_slots(g, kind, labels), engine.guarded, nodes_to_recompute
            )
            # AOTAutograd has a cache of compiled graphs. It would return a graph from the cache without a
            # call of teraio's compiler.
            with functorch_config.patch(enable_autograd_cache=False):
                compiled = slotted(gm, example_inputs)
        else:
            compiled = codegen.compile_program(
                gm,
                example_inputs,
                log.warning,
                lambda: _label_loaded_programs(labels),
                guard=True,
                settings=settings,
                again=(nodes_to_recompute, recompute_cache_key()),
            )
    return _wrap_to_note_grad_mode(compiled)


def _wrap_to_note_grad_mode(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the compiled graph. The wrapper first records in the engine whether the caller has
    grad mode enabled.

    AOTAutograd sets no_grad mode before it runs a graph without a backward. So the compiled graph itself
    cannot detect the caller's grad mode.
    """

    @functools.wraps(compiled)
    def note_grad_mode_and_call(*args: Any) -> Any:
        if (running := engine.ENGINE) is not None:
            running.tracker.note_grad_mode(torch.is_grad_enabled())
        return compiled(*args)

    return note_grad_mode_and_call


def _device_of_graph(gm: torch.fx.GraphModule, inputs: list[Any]) -> torch.device:
    """Return the device of a graph, which is the device of the graph's input tensors.

    A graph on a GPU may also have one-element tensors in RAM, so such tensors do not count. If no tensor
    counts, return the device of the session.
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    on = {x.device for x in tensors if x.numel() > 1 or x.device.type != "cpu"}
    if not on and session.SESSION is not None:
        return session.SESSION.device.device
    others = {device.type for device in on} - {"cpu", "cuda", "meta"}
    if others and not is_disabled():
        names = ", ".join(sorted(others))
        raise UnsupportedError(f"a graph on {names}: teraio supports cuda and cpu only")
    gpus = [device for device in on if device.type == "cuda"]
    if not gpus:
        return torch.device("cpu")
    gpus = sorted({*gpus, *_gpus_of_graph_nodes(gm)}, key=str)
    if len(gpus) > 1 and not is_disabled():
        raise UnsupportedError(
            f"a graph on {' and '.join(map(str, gpus))}: one process keeps the memory of one device within a "
            f"budget. Put the model on one device, or compile the layers of one device with backend='teraio' "
            f"and leave the others to another backend"
        )
    return gpus[0]


def _gpus_of_graph_nodes(gm: torch.fx.GraphModule) -> set[torch.device]:
    """Return the GPUs that hold values of the graph's nodes."""
    values = tree_leaves([node.meta.get("example_value") for node in gm.graph.nodes])
    return {value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda}


def _raise_unwrapped(error: TeraioError) -> NoReturn:
    """Raise `error` so that the user gets it unchanged, without Dynamo's frames.

    Dynamo wraps an error of a backend in BackendCompilerFailed, unless the error already has this type. So
    the raised error has two types: the type of `error`, and BackendCompilerFailed. It keeps the name, module
    and message of `error`.
    """
    kind = type(error)
    unchanged = {"__str__": lambda self: str(error), "__reduce__": lambda self: error.__reduce__()}
    both = type(kind.__name__, (kind, BackendCompilerFailed), {**unchanged, "__module__": kind.__module__})
    raised = both.__new__(both, *error.args)
    ShortenTraceback.__init__(raised, *error.args, first_useful_frame=sys._getframe())
    raised.backend_name, raised.inner_exception = "teraio", error
    raised.__dict__.update(error.__dict__)
    raise raised.with_traceback(error.__traceback__) from error.__cause__


def _reset() -> None:
    """Reset teraio's session, because `torch._dynamo.reset()` forgets all compiled models."""
    reset()


backend.reset = _reset  # type: ignore[attr-defined]


def register_for_dynamo_resets() -> None:
    """Register the backend with Dynamo, so that the next `torch._dynamo.reset()` calls `backend.reset`.

    Dynamo registers a backend when the user calls `torch.compile`, and forgets the backend at a reset. If a
    model is called again after a reset, Dynamo does not register the model's backend again.
    """
    registered = getattr(eval_frame, "cached_backends", None)
    if registered is not None:
        registered.setdefault(id(backend), backend)


def _copy_foreign_weights(labels: tuple[str, ...], inputs: list[Any]) -> None:
    """Copy a weight into memory of torch's allocator, if a file, numpy or another library owns the weight's
    memory."""
    assert engine.ENGINE is not None
    stuck = engine.ENGINE.unresizable
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    foreign = [
        (name, local_tensor(t))
        for name, t in zip(labels, tensors)
        if is_unresizable_weight(t) and name not in stuck.refused
    ]
    if foreign:
        blocks = [(name, t) for name, t in weights_of_compiled_modules() if is_unresizable_weight(t)]
        stuck.make_resizable([*foreign, *blocks])


def _note_sharded_weights(inputs: list[Any]) -> None:
    """Note all sharded weights, if some of them are inputs of the graph. The program gets only their local
    tensors. If several blocks share the program, the backend gets the weights of the first block only."""
    assert engine.ENGINE is not None
    if any(map(is_shard, inputs)):
        for weight in all_sharded_weights():
            engine.ENGINE.known_tensors.note_whole(weight)


def _insert_eager_slots(graph: torch.fx.GraphModule, kind: ProgramKind, labels: tuple[str, ...]) -> None:
    from teraio.passes.fx import program as fx

    observed = engine.ENGINE is None or engine.ENGINE.mover.device.observer is not None
    schedule, connect = fx.insert_slots(graph, kind, views_read_nothing=observed)
    with _label_loaded_programs(labels):
        connect(engine.program(schedule.as_json_text))


def _label_loaded_programs(labels: tuple[str, ...]) -> AbstractContextManager[list[Program]]:
    """Return a context manager. In its `with` block, each loaded program gets the user's names for its
    arguments."""

    def label_program(program: Program) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("teraio: %s", schedule_listing(program.schedule))
        failures.take_part_if_collective([slot.kernel for slot in program.schedule.slots])
        if program.schedule.kind != "backward":
            program.name_arguments(labels)
        note_loaded_program(program.schedule)

    return engine.collect_loaded_programs(label_program)


# `torch.compile` imports this module before Dynamo traces the model, so the hooks are installed in time.
if torch_versions.is_tested(torch.__version__):
    # The hooks run in the order of their installation. The hook of uncompiled_models may start the engine,
    # which the runtime's hooks use. So install it first.
    uncompiled_models.install(backend)
    patch_torch()
