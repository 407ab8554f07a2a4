"""Slots in Inductor's wrapper IR. The wrapper IR is the list of typed lines that Inductor prints as a
program, after scheduling, fusion and buffer reuse.

In: a captured graph. Out: Inductor's compiled program with slot calls. The lines are read as events,
`layout.py` places the slots, and each slot becomes one more line. Kernels keep their names and their order.
Only this package depends on Inductor's internals. options.py checks the settings of Inductor.

The schedule is printed into the program as a literal, so that Inductor's cache stores the schedule with the
program. The pass's `uuid` is part of the cache key. Without the `uuid`, the cache could return a program
without slots, which would run over budget without an error.
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
from teraio.units import fmt_bytes, fmt_count

from ..capture import aot, recompute_cut
from ..slots import events, layout, recompute_chains, symbolic_sizes
from ..slots.events import Make, Signature
from ..slots.layout import SlotPlace, lay_slots, live_bytes_per_launch, schedule_as_one_kernel
from . import calls, lines, partition
from .calls import Subprogram, WrapperProgramReader, read_subprogram
from .lines import UnknownLineError, UserStreamsError, storage_bytes_and_expression
from .options import refuse_unfit_settings

log = logging.getLogger("teraio")


def _hash_slot_sources() -> str:
    """Return a hash of the source files that determine the text printed into a program."""
    modules = (recompute_chains, aot, events, calls, lines, recompute_cut, symbolic_sizes, layout, schedules)
    files = [__file__, *(module.__file__ for module in modules)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(str(file)).read_bytes())
    return f"teraio-slots-4 {digest.hexdigest()[:32]}"


# A part of Inductor's cache key. It contains a number (`teraio-slots-4`). Raise this number if the arguments
# of the function that slots call change.
VERSION = _hash_slot_sources()

SLOT = "_teraio_slot"
REGISTRY = "teraio.runtime.engine.engine"  # module whose function `program` a loaded program calls


@dataclasses.dataclass
class SlotLine(wrapper.WrapperLine):
    """A wrapper line that prints a slot call."""

    wrapper: Any
    index: int
    names: tuple[str, ...]
    live: Any  # live bytes; an expression of symbols is printed, and evaluated at run time

    def codegen(self, code: Any) -> None:
        tensors = "".join(f"{name}, " for name in self.names)
        live = "" if isinstance(self.live, int) else f", {self.wrapper.codegen_python_sizevar(self.live)}"
        code.writeline(f"{SLOT}({self.index}, ({tensors}){live})")


@dataclasses.dataclass(frozen=True)
class Compilation:
    """The state of the compile in progress. The wrapper that Inductor creates reads this state."""

    kind: ProgramKind
    to_caller: int
    held: frozenset[int]
    notice: Callable[[str], None]
    registry: str
    guard: bool  # True if calls of the program go through the registry's function `guarded`
    cut: recompute_cut.JointGraphCut | None = None
    subprograms: dict[str, Subprogram] = dataclasses.field(default_factory=dict)


COMPILING: list[Compilation] = []
ONE_AT_A_TIME = threading.RLock()  # a lock, because a backward is compiled in the thread that first runs it


class SlottedWrapper(wrapper.PythonWrapperCodegen):
    """Inductor's wrapper with slots.

    The wrapper makes one more pass over the lines, and prints the schedule as a literal.
    """

    schedule: Schedule

    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: Any, parent_wrapper: Any, partition_signatures: Any = None
    ) -> Any:
        if is_subgraph:
            return SubprogramWrapper(subgraph_name, parent_wrapper, partition_signatures)
        if V.graph.name:  # a variant of a part of the program that Inductor only times for tuning
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
    """A wrapper of a branch or loop body.

    The wrapper prints no slots. It records the bytes of the body, which the slot of the body's caller needs.
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
    """Schedule a program with an unknown wrapper line as one kernel, and report the line.

    Slots after an unknown line could be wrong, so the program gets only the first and the last slot.
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
        gradients=aot.gradient_edge_per_output(compilation.kind, len(outputs)),
    )


class SlotsInCacheKey(CustomGraphPass):
    """A graph pass that changes no graph. Its `uuid` is part of the cache keys.

    The caches of AOTAutograd (whole models) and of Inductor (single graphs) therefore never return a program
    with other slots or without slots. A pass that the user has set still runs, and its uuid is part of the
    key as well.
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
        # The graph alone is no sufficient key. Two models may have the same forward graph, although one model
        # returns a tensor to the user that the other model saves for its backward.
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
    """Compile a captured graph with Inductor, with slots. Without `notice`, compile it without slots.

    `again` is the pair for `partitioner_config_patch`: (1) a function that names the nodes to recompute, and
    (2) a stable description of all nodes that this function may name. `settings` are Inductor's own settings.
    `loads` opens a block and yields the programs that are loaded in the block.

    The backward is compiled later, at its first run, so slots and settings are set up for each graph. All
    that a program needs is printed into the program, including the `guard` of its calls. AOTAutograd's cache
    can therefore return forward and backward without a run of `inner_compile`.
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
        empty = count_calls(graph.graph) == 0  # counted before the compile, which changes the graph
        with loads() as loaded:
            compiled = _compile_graph_with_slots(graph, inputs, notice, registry, guard, **kwargs)
        if not empty:  # for a graph without operators, Inductor returns the graph itself
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
    """Raise UnsupportedError if a program has no slots, because it would run over budget without an error."""
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
    """Run Inductor's `compile_fx_inner` with slots.

    All set-up is per graph, because the backward is compiled later.
    """
    kind: ProgramKind = "forward"
    if kwargs.get("is_backward"):
        kind = "backward"
    elif kwargs.get("is_inference"):
        kind = "inference"
    returned: Any = gm.graph.output_node().args[0]
    to_caller, held = aot.count_outputs_to_caller(kind, len(returned)), aot.arguments_used_after_return(kind)
    cut = recompute_cut.read_cut_from_forward_meta(gm) if kind == "forward" else None
    compilation = Compilation(kind, to_caller, held, notice, registry, guard, cut)
    with ONE_AT_A_TIME:
        # Check the settings again, because a setting may have changed since the forward was compiled. A model
        # may also turn on CUDA graphs itself (torch.compiler.override_cudagraphs). Inductor passes that
        # setting on as an argument.
        graphs = kwargs.get("cudagraphs")
        refuse_unfit_settings({"triton.cudagraphs": True} if graphs is not None and graphs.value else {})
        what = f"compiling the {kind} program of {fmt_count(count_calls(gm.graph), 'operator')} with Inductor"
        with show_stage(what, say=log.info), use_slotted_wrapper(compilation):
            return compile_fx_inner(gm, example_inputs, **kwargs)
