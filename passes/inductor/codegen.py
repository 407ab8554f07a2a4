"""Slots in Inductor's wrapper IR. The wrapper IR is the list of typed lines that Inductor prints as a
program, after scheduling, fusion and buffer reuse.

In: a captured graph. Out: Inductor's compiled program with slot calls. A slot is a call of the engine before
a kernel, which makes the kernel's tensors resident. `lines.py` turns the wrapper's lines into events, and
`slots/layout.py` places the slots. Each slot becomes one more line. The names and the order of the kernels do
not change.

The program's text contains its schedule (the list of slots with their tensors). So Inductor's cache stores
the schedule with the program. The cache key contains a hash of this pass (SlotsInCacheKey). Otherwise the
cache could return a program without slots, which would exceed the budget without an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import count_calls
from torch._inductor import config, ir
from torch._inductor.codegen import common, wrapper
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from teraio import switches
from teraio.errors import UnsupportedError
from teraio.formats import schedule as schedules
from teraio.formats.schedule import ProgramKind, Schedule
from teraio.progress import show_stage
from teraio.ranks import collective_names
from teraio.units import fmt_bytes, fmt_count

from ..capture import aot, gathered_weights, recompute_cut
from ..slots import events, layout, library_workspace, recompute_chains, symbolic_sizes
from ..slots.events import Make, Signature
from ..slots.layout import SlotPlace, lay_slots, live_bytes_per_launch, schedule_as_one_kernel
from . import calls, lines, partition
from .calls import Subprogram, WrapperProgramReader, read_subprogram
from .lines import UnknownLineError, UserStreamsError, storage_bytes_and_expression
from .options import refuse_unfit_settings

log = logging.getLogger("teraio")


def _hash_slot_sources() -> str:
    """Return a hash of the source files that determine which text is printed into a program."""
    capture = (aot, gathered_weights, recompute_cut)
    slots = (events, layout, library_workspace, recompute_chains, symbolic_sizes)
    modules = (*capture, *slots, calls, lines, schedules, collective_names)
    files = [__file__, *(module.__file__ for module in modules)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(str(file)).read_bytes())
    return f"teraio-slots-4 {digest.hexdigest()[:32]}"


# A part of Inductor's cache key. It contains a number (`teraio-slots-4`). When you change the arguments of
# the function that slots call, raise this number.
VERSION = _hash_slot_sources()

SLOT = "_teraio_slot"
# When a program is loaded, it calls the function `program` of this module.
REGISTRY = "teraio.runtime.engine.engine"


@dataclasses.dataclass
class SlotLine(wrapper.WrapperLine):
    """A wrapper line that prints a slot: a call of the engine before a kernel."""

    wrapper: Any
    index: int
    names: tuple[str | None, ...]
    live: Any  # live bytes: a number, or an expression that the program evaluates at run time

    def codegen(self, code: Any) -> None:
        tensors = "".join(f"{name}, " for name in self.names)
        live = "" if isinstance(self.live, int) else f", {self.wrapper.codegen_python_sizevar(self.live)}"
        code.writeline(f"{SLOT}({self.index}, ({tensors}){live})")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """Facts about the graph that is being compiled. Inductor creates the wrapper, so the wrapper reads them
    from the list COMPILING.
    """

    kind: ProgramKind
    to_caller: int
    held: frozenset[int]
    gradients: tuple[int, ...]
    notice: Callable[[str], None]
    registry: str
    guard: bool  # True if the program is wrapped by the function `guarded` of module `registry`
    cut: recompute_cut.JointGraphCut | None = None
    subprograms: dict[str, Subprogram] = dataclasses.field(default_factory=dict)


COMPILING: list[Compilation] = []
ONE_AT_A_TIME = threading.RLock()  # lock: a backward is compiled in the thread that first runs it


class SlottedWrapper(wrapper.PythonWrapperCodegen):
    """Inductor's wrapper with slots.

    After Inductor's own passes over the lines, this wrapper inserts the slots. It also prints the schedule
    into the program.
    """

    schedule: Schedule

    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None
    ) -> Any:
        if is_subgraph:
            return SubprogramWrapper(subgraph_name, parent_wrapper, partition_signatures)
        if V.graph.name:  # a trial version of a part of the program, which Inductor runs only to time it
            return wrapper.PythonWrapperCodegen()
        return SlottedWrapper()

    def run_wrapper_ir_passes(self, is_inference: bool) -> None:
        super().run_wrapper_ir_passes(is_inference)
        compilation = COMPILING[-1]
        signature = build_program_signature(compilation)
        program = WrapperProgramReader(self.lines, set(V.graph.get_output_names()), compilation.subprograms)
        try:
            try:
                self.schedule, places = lay_slots(signature, list(program.events()), len(self.lines))
            except UnknownLineError as line:
                self.schedule, places = schedule_unreadable_program(
                    signature, program, str(line), compilation.notice
                )
        except UserStreamsError:
            raise UnsupportedError(
                "the model runs kernels on CUDA streams of its own; teraio moves memory in the order of one "
                "stream. Remove torch.cuda.stream(...) from the compiled model"
            ) from None
        bounded = [
            dataclasses.replace(p, live=program.symbols.replace_unbound_symbols(p.live, p.at)) for p in places
        ]
        merged = merge_slots_into_lines(self, bounded)
        log.debug(
            "teraio: pass slots: %s program of %d wrapper lines: %d slots for %d storages, %d lines",
            signature.kind,
            len(self.lines),
            len(places),
            len(self.schedule.buffers),
            len(merged),
        )
        self.lines = merged

    def generate_before_suffix(self, result: Any) -> None:
        super().generate_before_suffix(result)
        result.writeline(f"{SLOT} = _teraio_program({self.schedule.as_json_text!r})")

    def generate_end(self, result: Any) -> None:
        super().generate_end(result)
        if COMPILING[-1].guard:
            result.writeline("call = _teraio_guarded(call)")

    def write_header(self) -> None:
        super().write_header()
        guarded = ", guarded as _teraio_guarded" if COMPILING[-1].guard else ""
        self.imports.splice(f"from {COMPILING[-1].registry} import program as _teraio_program{guarded}")


class SubprogramWrapper(wrapper.SubgraphPythonWrapperCodegen):
    """A wrapper of the body of a branch or loop.

    The wrapper prints no slots. It records the bytes that the body needs, for the slot before the branch or
    loop.
    """

    def run_wrapper_ir_passes(self, is_inference: bool) -> None:
        super().run_wrapper_ir_passes(is_inference)
        compilation = COMPILING[-1]
        compilation.subprograms[V.graph.name] = read_subprogram(
            self.lines,
            compilation.subprograms,
            lambda line: compilation.notice(
                f"teraio: a branch or body has a wrapper line {line} that teraio cannot read: its memory "
                f"is not counted"
            ),
        )


def schedule_unreadable_program(
    signature: Signature, program: WrapperProgramReader, line: str, notice: Callable[[str], None]
) -> tuple[Schedule, list[SlotPlace]]:
    """Make the schedule of a program that has a wrapper line of unknown type, and report the line.

    Slots after such a line could be wrong. So the program counts as one kernel, and gets only the first and
    the last slot.
    """
    made = list(program.events(unknown=lambda line: None))
    own = symbolic_sizes.largest(live_bytes_per_launch(made), "program")
    arguments = sum(size_bytes for _, size_bytes in signature.arguments)
    notice(
        f"teraio: a {signature.kind} program has a wrapper line {line} that teraio cannot read, so it runs "
        f"as one kernel: its arguments ({fmt_bytes(arguments)}) and the tensors that it makes (about "
        f"{fmt_bytes(own.size_bytes)}) are in memory at once and cannot be evicted while it runs"
    )
    sized = {event.name: event.size_bytes for event in made if isinstance(event, Make)}
    outputs = [(name, sized.get(name, 0)) for name in signature.outputs if name]
    return schedule_as_one_kernel(signature, "program", own, len(program.lines), outputs)


def merge_slots_into_lines(wrapped: SlottedWrapper, places: list[SlotPlace]) -> list[Any]:
    by_position: dict[int, list[SlotLine]] = {}
    for index, place in enumerate(places):
        by_position.setdefault(place.at, []).append(SlotLine(wrapped, index, place.names, place.live))
    merged: list[Any] = []
    for position in range(len(wrapped.lines) + 1):
        merged += by_position.get(position, ())
        merged += wrapped.lines[position : position + 1]
    return merged


def build_program_signature(compilation: Compilation) -> Signature:
    graph = V.graph
    tensors = (ir.TensorBox, ir.StorageBox, ir.Buffer)
    names = list(graph.graph_inputs)
    constants = (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)
    outputs = [None if isinstance(output, constants) else output.get_name() for output in graph.graph_outputs]
    cut = compilation.cut
    return Signature(
        kind=compilation.kind,
        graph=cut.graph if cut else "",
        nodes=cut.nodes if cut and len(cut.nodes) == len(outputs) else (),
        possible=cut.recomputable_nodes if cut else frozenset(),
        arguments=tuple(
            (n, storage_bytes_and_expression(v)[0])
            for n, v in graph.graph_inputs.items()
            if isinstance(v, tensors)
        ),
        outputs=tuple(outputs),
        saved=frozenset(range(compilation.to_caller, len(outputs))),
        held=frozenset(names[index] for index in compilation.held if index < len(names)),
        gradients=compilation.gradients if len(compilation.gradients) == len(outputs) else (),
    )


class SlotsInCacheKey(CustomGraphPass):
    """A graph pass that changes no graph, and only adds its `uuid` to the cache keys.

    AOTAutograd caches whole models, and Inductor caches single graphs. Because of the `uuid`, neither cache
    returns a program with other slots or without slots. `inner` is a pass that the user has set, or None. It
    still runs, and its `uuid` is part of the key as well.
    """

    def __init__(self, inner: Any, about: str) -> None:
        self.inner = inner
        self.version = f"{VERSION} {about}"

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)

    def uuid(self) -> Any:
        if self.inner is None:
            return self.version
        inner = self.inner.uuid() if hasattr(self.inner, "uuid") else None
        return None if inner is None else f"{self.version}+{inner}"


@contextmanager
def use_slotted_wrapper(compilation: Compilation) -> Iterator[None]:
    common.init_backend_registration()
    saved = dict(common.device_codegens)
    for device in ("cpu", "cuda"):
        if device in saved:
            codegen = dataclasses.replace(saved[device], wrapper_codegen=SlottedWrapper)
            common.device_codegens[device] = codegen
    COMPILING.append(compilation)
    try:
        # A key from the graph alone is not sufficient. Two models may have the same forward graph, but one
        # returns a tensor to the user, and the other saves this tensor for its backward.
        about = f"{compilation.kind} returns {compilation.to_caller} holds {sorted(compilation.held)}"
        about += f" calls {compilation.registry} without {sorted(switches.disabled_features())}"
        if cut := compilation.cut:
            about += f" of {cut.graph}"
        key = SlotsInCacheKey(config.post_grad_custom_post_pass, about)
        with config.patch(post_grad_custom_post_pass=key):
            yield
    finally:
        COMPILING.pop()
        common.device_codegens.update(saved)


def compile_program(
    gm: torch.fx.GraphModule,
    example_inputs: Any,
    notice: Callable[[str], None] | None,
    loads: Callable[[], AbstractContextManager[Sized]] = lambda: nullcontext((None,)),
    guard: bool = False,
    registry: str = REGISTRY,
    settings: Mapping[str, Any] | None = None,
    again: tuple[recompute_cut.ChooseRecompute | None, str] = (None, ""),
) -> Any:
    """Compile a captured graph with Inductor, with slots. If `notice` is None, compile it without slots.

    `again` is the pair for `partitioner_config_patch`: (1) a function that names the nodes to recompute, and
    (2) a stable description of all nodes that this function may name. `settings` are Inductor's own settings.
    `loads` opens a block, and yields the programs that are loaded in the block.

    Inductor compiles the backward later, at its first run. So `inner_compile` sets up slots and settings for
    each graph. AOTAutograd's cache can return forward and backward without a call of `inner_compile`. So the
    program's text contains everything that the program needs, including the wrapper of its calls (`guard`).
    """
    patches = dict(settings or {})
    if notice is None:
        plain: Any = compile_fx(gm, example_inputs, config_patches=patches)
        return plain
    about = f"{registry} guard {guard} without {sorted(switches.disabled_features())}"
    patches["post_grad_custom_post_pass"] = SlotsInCacheKey(config.post_grad_custom_post_pass, about)
    patches |= partition.partitioner_config_patch(*again, VERSION)
    compiled_graphs = 0

    def inner_compile(graph: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        nonlocal compiled_graphs
        compiled_graphs += 1
        empty = count_calls(graph.graph) == 0  # count operators before the compile changes the graph
        with loads() as loaded:
            compiled = _compile_graph_with_slots(graph, inputs, notice, registry, guard, **kwargs)
        if not empty:  # for a graph without operators, Inductor returns the graph, which has no slots
            _require_slots(compiled, len(loaded))
        return compiled

    with loads() as from_cache:
        slotted: Any = compile_fx(gm, example_inputs, inner_compile=inner_compile, config_patches=patches)
    if not compiled_graphs and not from_cache:
        raise UnsupportedError(
            "Inductor compiled a model without calling teraio for any of its graphs: the model would run "
            "without slots and over the budget. If a setting replaces Inductor's compiler (TORCH_BISECT_*, "
            "a cache of compiled models), unset it, or compile without teraio"
        )
    return slotted


def _require_slots(compiled: Any, reported: int) -> None:
    """Raise UnsupportedError if a program has no slots. Otherwise it would exceed the budget without an
    error.
    """
    source = getattr(compiled, "source_code", None) or ""
    if f"{SLOT}(0, " not in source:
        raise UnsupportedError(
            f"Inductor returned a program without teraio's slots ({type(compiled).__name__}, "
            f"{len(source)} characters of source): it would silently run over the budget. The program is for "
            f"a device other than CPU and CUDA, or another library replaces Inductor's wrapper. Compile "
            f"without teraio, or with inner='eager'"
        )
    if not reported:
        raise UnsupportedError(
            "a compiled program did not report to teraio when it was loaded, so its slots would do nothing. "
            "A cache returned a program that was loaded earlier. Set "
            "torch._inductor.config.force_disable_caches = True"
        )


def _compile_graph_with_slots(
    gm: torch.fx.GraphModule,
    example_inputs: Any,
    notice: Callable[[str], None],
    registry: str,
    guard: bool,
    **kwargs: Any,
) -> Any:
    """Compile one graph by Inductor's `compile_fx_inner`, with slots.

    Set up slots for this graph only, because Inductor compiles the backward later than the forward.
    """
    kind: ProgramKind = "forward"
    if kwargs.get("is_backward"):
        kind = "backward"
    elif kwargs.get("is_inference"):
        kind = "inference"
    output: Any = gm.graph.output_node()
    to_caller = aot.count_outputs_to_caller(kind, len(output.args[0]))
    held, gradients = aot.arguments_used_after_return(kind), aot.gradient_edge_per_output(kind, output)
    cut = recompute_cut.read_cut_from_meta(gm)
    compilation = Compilation(kind, to_caller, held, gradients, notice, registry, guard, cut)
    with ONE_AT_A_TIME:
        # Check the settings again, because a setting may have changed since the forward was compiled. A model
        # may turn on CUDA graphs itself (torch.compiler.override_cudagraphs). Inductor passes this setting as
        # the argument `cudagraphs`.
        graphs = kwargs.get("cudagraphs")
        refuse_unfit_settings({"triton.cudagraphs": True} if graphs is not None and graphs.value else {})
        what = f"compiling the {kind} program of {fmt_count(count_calls(gm.graph), 'operator')} with Inductor"
        with show_stage(what, say=log.info), use_slotted_wrapper(compilation):
            return compile_fx_inner(gm, example_inputs, **kwargs)
