"""A reader of Inductor's wrapper lines. In: wrapper lines. Out: events (`slots/events.py`).

The reader compares names of line classes, because torch 2.11 lacks some classes of torch 2.13. For a line of
an unknown class, it raises UnknownLineError. Slots (calls of the engine) after such a line could be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import config, ir
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..slots import library_workspace, symbolic_sizes
from ..slots.events import Alias, Event, Forget, Launch, Make

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
SYMBOL = re.compile(r"(u[0-9]+) = ")
CARRIES_NOTHING = {
    "LineContext",
    "NullLine",
    "CommentLine",
    "AssertSizeStrideLine",
    "GroupedAssertSizeStrideLine",
    "AssertAlignmentLine",
    "AssertDivByZeroLine",
    "UnbackedSymbolDefsLine",
    "KernelDefinitionLine",
    "EnterDeviceContextManagerLine",
    "ExitDeviceContextManagerLine",
    "SymbolicCallArgLine",
    "ExitDeviceContextManagerWithStreamInfoLine",
}
EXTERN = {
    "ExternKernelOutLine",
    "ExternKernelAllocLine",
    "ExternKernelMultiOutLine",
    "IndexPutFallbackLine",
    "ScatterFallbackLine",
}
STREAMS = {"EnterCudaStreamContextLine", "ExitCudaStreamContextLine"}


class UnknownLineError(Exception):
    """A wrapper line of a type that teraio cannot read. Its program then counts as one kernel."""


class UserStreamsError(Exception):
    """A wrapper line that runs kernels on CUDA streams that the user's model has chosen."""


@dataclass
class WrapperSymbols:
    """Symbols of a program with dynamic shapes: the line that gives each symbol a value, and limits for
    symbols without a value.
    """

    inputs: frozenset[str]
    at: dict[str, int] = field(default_factory=dict)
    estimates: dict[Any, Any] = field(default_factory=dict)

    def replace_unbound_symbols(self, live: Any, at: int) -> Any:
        """Return the expression `live`, with a limit in place of each symbol that has no value before line
        `at`.
        """
        if isinstance(live, int):
            return live
        for symbol in live.free_symbols - self.estimates.keys():
            shape_env = V.graph.sizevars.shape_env
            limit = symbolic_sizes.upper_limit_of_symbol(symbol, shape_env)
            if limit is None:
                limit = symbolic_sizes.size_at_traced_shapes(
                    symbol, shape_env, config.unbacked_symint_fallback
                )
            self.estimates[symbol] = limit
        return symbolic_sizes.replace_unbound_symbols(
            live, lambda symbol: self.is_bound_before(symbol, at), self.estimates
        )

    def is_bound_before(self, symbol: Any, at: int) -> bool:
        unbacked = symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))
        return str(symbol) in self.inputs or self.at.get(str(symbol), at if unbacked else -2) < at


def _input_symbols() -> frozenset[str]:
    symbols: set[str] = set()
    for value in V.graph.graph_inputs.values():
        if isinstance(value, sympy.Expr):
            symbols |= {str(symbol) for symbol in value.free_symbols}
        elif isinstance(value, ir.TensorBox):
            terms = [*value.get_size(), *value.get_stride()]
            symbols |= {str(symbol) for term in terms for symbol in sympy.sympify(term).free_symbols}
    return frozenset(symbols)


def identifiers_in_text(value: object) -> frozenset[str]:
    return frozenset(IDENTIFIER.findall(value)) if isinstance(value, str) else frozenset()


def storage_bytes_and_expression(node: Any) -> tuple[int, Any]:
    """Return a pair for a buffer: the number of bytes, and an expression for this number.

    If the size depends on symbols (dynamic shapes), the number is an estimate. Otherwise the expression is
    None.
    """
    elements = V.graph.get_allocation_storage_size(node)
    item = get_dtype_size(node.get_dtype())
    hint = int(V.graph.sizevars.optimization_hint(elements, fallback=0)) * item
    static = isinstance(elements, int) or getattr(elements, "is_number", False)
    return hint, None if static else elements * item


class WrapperLineReader:
    """A reader that turns single wrapper lines into events: new storages, their names, and kernels."""

    def __init__(self, lines: list[Any], outputs: set[str]) -> None:
        self.lines = lines
        self.outputs = outputs
        self.known: set[str] = set(V.graph.graph_inputs)
        self.symbols = WrapperSymbols(_input_symbols())
        self.elements: dict[str, list[str]] = {}  # name of a tuple -> the names of its elements
        self.unpacked: dict[str, list[Any]] = {}  # name of a tuple -> the lines that take its elements
        self.copies: dict[str, str] = {}  # result of a collective in flight -> name of its workspace
        for line in lines:
            if type(line).__name__ == "MultiOutputLine":
                self.unpacked.setdefault(line.arg_name, []).append(line)

    def events_of_line(self, at: int, line: Any) -> Iterator[Event]:  # noqa: PLR0912  one branch per type
        kind = type(line).__name__
        if isinstance(line, str):
            yield from self.events_of_raw_text(at, line)
        elif kind in CARRIES_NOTHING:
            if kind == "UnbackedSymbolDefsLine":
                self.symbols.at.update((str(symbol), at) for symbol in line.unbacked_bindings or ())
        elif kind == "AllocateLine":
            yield Make(at, line.node.get_name(), *storage_bytes_and_expression(line.node))
        elif kind in {"ReuseLine", "ReinterpretLine"}:
            yield Alias(at, line.reused_as.get_name(), line.node.get_name())
            if getattr(line, "delete_old", False) and line.node.get_name() not in self.outputs:
                yield Forget(at, line.node.get_name())
        elif kind in {"FreeIfNotReusedLine", "FreeLine"}:
            yield from self.events_of_free(at, line)
        elif kind == "KernelCallLine":
            yield Launch(at, line.kernel_name, *names_read_and_written(line))
        elif kind in EXTERN:
            yield from self.events_of_extern_kernel(at, line)
        elif kind == "MultiOutputLine":
            yield from self.events_of_unpack(at, line)
        elif kind == "DynamicScalarLine":
            self.symbols.at[str(line.node.sym)] = at
            yield Launch(
                at, "item", identifiers_in_text(line.node.inputs[0].codegen_reference()), frozenset()
            )
        elif kind in STREAMS or getattr(line, "num_streams", 1) > 1:
            raise UserStreamsError
        elif kind != "EnterDeviceContextManagerWithStreamInfoLine":
            raise UnknownLineError(kind)

    def events_of_free(self, at: int, line: Any) -> Iterator[Event]:
        if not getattr(line, "is_reused", False):
            name = line.node.get_name()
            yield Forget(at, name)
            yield from (Forget(at, part) for part in self.elements.get(name, ()))

    def events_of_raw_text(self, at: int, line: str) -> Iterator[Event]:
        """Yield the events of a line that is a string instead of an object.

        Lines of this kind are comments, asserts, `del x`, `x = copy_if_misaligned(x)` and `dst.copy_(src)`.
        """
        line = line.strip()
        if line.startswith("del "):
            yield from (Forget(at, name) for name in sorted(identifiers_in_text(line[4:])))
        elif not line.startswith(("#", "assert")):
            if symbol := SYMBOL.match(line):
                self.symbols.at[symbol[1]] = at
            names = identifiers_in_text(line) & self.known
            if names:
                yield Launch(at, "text", names, frozenset() if "= copy_if_misaligned(" in line else names)

    def events_of_unpack(self, at: int, line: Any) -> Iterator[Event]:
        node = V.graph.get_buffer(line.result_name)
        shared = list(node.get_inputs_that_alias_output()) if node is not None else []
        yield Alias(
            at, line.result_name, shared[0] if shared else name_of_tuple_element(line.arg_name, line.indices)
        )

    # ---- library kernels

    def events_of_extern_kernel(self, at: int, line: Any) -> Iterator[Event]:
        """Yield the events of a library kernel.

        The tensors that the kernel reads are also taken from the printed arguments, because `get_read_names`
        omits inputs of the graph.
        """
        node, kind = line.node, type(line).__name__
        name = node.get_name()
        reads = set(node.get_read_names())
        if kind in {"IndexPutFallbackLine", "ScatterFallbackLine"}:
            for value in node.inputs:
                reads |= identifiers_in_text(value.codegen_reference())
        else:
            keywords = (
                node.codegen_kwargs(skip_out=True) if kind == "ExternKernelOutLine" else node.codegen_kwargs()
            )
            for argument in [*node.codegen_args(), *keywords]:
                reads |= identifiers_in_text(str(argument))
        writes = set(node.get_mutation_names())
        if kind == "ExternKernelOutLine":
            writes |= {name}
        elif kind == "ExternKernelMultiOutLine":
            writes |= {out.get_name() for out in node.out_variant_output_nodes}
        elif kind == "ExternKernelAllocLine":
            self.note_symbol_limits(node)
            made = list(self.events_of_allocated_results(at, node))
            yield from made
            writes |= {event.name for event in made if isinstance(event, Make)}
        kernel = str(node.get_kernel_name() or name)
        if isinstance(node, ir._WaitKernel):
            yield from self.events_of_wait(at, kernel, node, frozenset(reads))
        elif isinstance(node, ir._CollectiveKernel):
            own = f"{name}.own"
            if (size_bytes := _bytes_copied_by_collective(node)) > 0:
                yield Make(at, own, size_bytes)
                self.copies |= dict.fromkeys(writes, own)
            results = frozenset(writes)
            text = library_workspace.collective_as_text(_name_of_operator(node), list(node.constant_args))
            yield Launch(at, kernel, frozenset(reads), results, begins=results, collective=text)
        else:
            yield Launch(at, kernel, frozenset(reads), frozenset(writes))

    def events_of_wait(self, at: int, kernel: str, node: Any, reads: frozenset[str]) -> Iterator[Event]:
        """Yield the events of a wait for a collective: the launch, and the end of the collective's
        workspace."""
        awaits = frozenset().union(*(identifiers_in_text(str(text)) for text in node.codegen_args()))
        yield Launch(at, kernel, reads, awaits, awaits=awaits)
        for name in {self.copies[result] for result in awaits if result in self.copies}:
            yield Forget(at, name)
            self.copies = {result: own for result, own in self.copies.items() if own != name}

    def events_of_allocated_results(self, at: int, node: Any) -> Iterator[Event]:
        """Yield the results of a kernel that allocates its own outputs.

        Some results may have no line that takes them from the tuple. These are included.
        """
        name = node.get_name()
        shared = list(node.get_inputs_that_alias_output())
        if shared:
            yield Alias(at, name, shared[0])
        elif isinstance(node.layout, ir.MultiOutputLayout):
            results = {
                name_of_tuple_element(name, out.indices): out
                for out in flatten_outputs(getattr(node, "outputs", ()))
            }
            for line in self.unpacked.get(name, ()):
                results.setdefault(
                    name_of_tuple_element(name, line.indices), V.graph.get_buffer(line.result_name)
                )
            self.elements[name] = list(results)
            for part, result in results.items():
                if not result.get_inputs_that_alias_output():
                    yield Make(at, part, *storage_bytes_and_expression(result))
        elif isinstance(node.layout, ir.Layout):
            yield Make(at, name, *storage_bytes_and_expression(node))

    def note_symbol_limits(self, node: Any) -> None:
        """Record upper limits of the symbols whose values depend on this kernel's data (`nonzero`, `unique`,
        `masked_select`).

        If torch has no limit for a symbol, the limit is the number of elements of the kernel's largest input.
        """
        for symbol in node.get_unbacked_symbol_defs():
            limit = symbolic_sizes.upper_limit_of_symbol(symbol, V.graph.sizevars.shape_env)
            if limit is None:
                counts = [
                    Make(0, "", 0, sympy.sympify(value.get_numel()))
                    for value in node.inputs
                    if isinstance(value, ir.TensorBox | ir.StorageBox | ir.Buffer | ir.ReinterpretView)
                ]
                limit = symbolic_sizes.largest(counts, "").bytes_or_expression
            self.symbols.estimates[symbol] = limit


def _bytes_copied_by_collective(node: Any) -> int:
    """Return the bytes of the workspace that a collective on CPU keeps until its results are waited for."""
    if node.get_device() is None or node.get_device().type != "cpu":
        return 0
    copied = library_workspace.tensors_copied_by_collective(
        _name_of_operator(node), list(node.inputs), list(node.outputs)
    )
    return sum(storage_bytes_and_expression(each)[0] for each in copied)


def _name_of_operator(node: Any) -> str:
    return str(node.op_overload._schema.name.partition("::")[2])


def is_blank_or_comment(line: Any) -> bool:
    return isinstance(line, str) and (not line.strip() or line.strip().startswith("#"))


def flatten_outputs(outputs: Any) -> list[Any]:
    """Return the tensors among a kernel's results, at any depth of nesting."""
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return [tensor for output in outputs for tensor in flatten_outputs(output)]
    return [outputs] if isinstance(outputs, ir.MultiOutput) else []


def name_of_tuple_element(name: str, indices: Any) -> str:
    """Return a name for an element of a tuple. This name keeps the element alive as long as the tuple.

    The name contains a dot, so no variable has this name.
    """
    return ".".join([name, *(str(index) for _, index in indices)])


def names_read_and_written(line: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return a pair for a kernel that Inductor generated: the names of the tensors that it reads, and that it
    writes.

    If the access to an argument is unclear, the argument counts as read and as written. The only cost is an
    additional write when this tensor is evicted.
    """
    reads: set[str] = set()
    writes: set[str] = set()
    keys = list((line.triton_meta or {}).get("signature", ())) if line.triton else []
    mutated = set((line.inductor_meta or {}).get("mutated_arg_names", ())) if line.triton else set()
    for position, argument in enumerate(line.call_args):
        names = identifiers_in_text(argument if isinstance(argument, str) else str(argument))
        if line.triton:
            key = str(keys[position]) if position < len(keys) else ""
            only_read = key.startswith("in_ptr") and key not in mutated
            only_written = key.startswith("out_ptr")
        else:
            only_read = bool(line.arg_types) and str(line.arg_types[position]).startswith("const")
            only_written = False
        reads |= names if not only_written else frozenset()
        writes |= names if not only_read else frozenset()
    return frozenset(reads), frozenset(writes)
