"""Branches, loops and calls of subprograms among Inductor's wrapper lines. Each of them counts as one kernel.

    buf3 = [None] * 1           the region begins
    if buf1.item():
        true_graph_0_args = […]
        buf3 = true_graph_0(…)  the kernel reads and writes all tensors that the region's lines read and
    else:                       write, and needs the bytes of the largest body
        …
    buf4 = buf3[0]              an element of the result is unpacked

A *region* is the lines of one branch, loop or call. No slot (a call of the engine) is inside a region.
Inductor prints the bodies of a region as separate functions, with their inputs as arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import ir
from torch._inductor.virtualized import V

from ..slots import symbolic_sizes
from ..slots.events import Alias, Event, Forget, Launch, Make
from ..slots.layout import live_bytes_per_launch
from .lines import (
    CARRIES_NOTHING,
    UnknownLineError,
    WrapperLineReader,
    WrapperSymbols,
    flatten_outputs,
    identifiers_in_text,
    is_blank_or_comment,
    name_of_tuple_element,
    storage_bytes_and_expression,
)

FREES = {"FreeIfNotReusedLine", "FreeLine"}


@dataclass(frozen=True)
class Subprogram:
    """Facts about the body of a branch or loop: its memory, its results, and whether it writes to its
    arguments.
    """

    own: Make  # bytes that the body allocates, without its arguments and outputs
    returns: tuple[
        Make | int | None, ...
    ]  # per output: its storage, the position of the argument of which it is a view, or None for no tensor
    writes: bool  # True if the body writes to its arguments


class WrapperProgramReader(WrapperLineReader):
    """A reader that turns the lines of a program into events (`slots/events.py`).

    `subprograms` has the bodies of branches and loops, by name. Other readers have read them before.
    """

    def __init__(self, lines: list[Any], outputs: set[str], subprograms: dict[str, Subprogram]) -> None:
        super().__init__(lines, outputs)
        self.subprograms = subprograms

    def events(self, unknown: Callable[[str], None] | None = None) -> Iterator[Event]:
        """Yield the events of all lines.

        If a line has an unknown type, call `unknown` with its description, and skip the line. If `unknown` is
        None, raise UnknownLineError.
        """
        at = 0
        while at < len(self.lines):
            region = self.end_of_subprogram_call(at)
            try:
                found = list(
                    self.events_of_subprogram_call(at, region)
                    if region
                    else self.events_of_line(at, self.lines[at])
                )
            except UnknownLineError as line:
                if unknown is None:
                    raise
                unknown(str(line))
                found = []
            for event in found:
                match event:
                    case Make(_, name):
                        self.known.add(name)
                    case Alias(_, new):
                        self.known.add(new)
            yield from found
            at = region or at + 1

    def end_of_subprogram_call(self, at: int) -> int | None:
        """Return the end of the subprogram call that begins at line `at`, or None if this line begins no
        call.

        A call begins with `buf1 = [None] * 2` and continues with `if …:` and more lines.
        """
        begin = re.fullmatch(r"(\w+) = \[None\] \* \d+", str(self.lines[at]).strip())
        if not isinstance(self.lines[at], str) or not begin:
            return None
        mine = re.compile(
            rf"(if|while) .*:|else:|\s*should_loop = .*|{begin[1]}(\[|\.extend|_).*|\w+_args = \[.*"
            rf"|\(?({begin[1]}|[^=]*,)\)? = \w+\(\w+_args\)"
        )
        depth, end = 0, at + 1
        for position in range(at + 1, len(self.lines)):
            line = self.lines[position]
            kind = type(line).__name__
            depth += (kind == "EnterSubgraphLine") - (kind == "ExitSubgraphLine")
            if kind == "ExitSubgraphLine" or (isinstance(line, str) and mine.fullmatch(line)):
                end = position + 1
            elif depth == 0 and not (kind in CARRIES_NOTHING or kind in FREES or is_blank_or_comment(line)):
                break
        return end

    def events_of_subprogram_call(self, at: int, end: int) -> Iterator[Event]:
        name = str(self.lines[at]).partition(" = ")[0]
        node: Any = V.graph.name_to_buffer[name]
        graphs = [
            graph.graph.name
            for graph in vars(node).values()
            if isinstance(graph, ir.Subgraph) and graph.graph
        ]
        subprograms = [self.subprograms[graph] for graph in graphs]
        if not subprograms:
            raise UnknownLineError(f"{type(node).__name__} without a body")
        reads: set[str] = set()
        for value in (*node.inputs, getattr(node, "predicate", None)):
            if hasattr(value, "codegen_reference"):
                reads |= identifiers_in_text(value.codegen_reference())
        for line in self.lines[at:end]:
            if isinstance(line, str) and not is_blank_or_comment(line):
                reads |= identifiers_in_text(line)
        reads &= self.known
        made = list(self.events_of_call_results(at, name, node, subprograms))
        yield from made
        yield self.workspace_of_subprograms(at, name, node, subprograms)
        writes = set(node.get_mutation_names()) | {event.name for event in made if isinstance(event, Make)}
        if any(subprogram.writes for subprogram in subprograms):
            writes |= reads
        yield Launch(at, name, frozenset(reads), frozenset(writes))
        yield Forget(end - 1, f"{name}.own")
        yield from self.events_of_frees_in_branches(at, end)

    def events_of_call_results(
        self, at: int, name: str, node: Any, subprograms: list[Subprogram]
    ) -> Iterator[Make | Alias]:
        """Yield the results of a call. If branches return storages of different sizes, the largest size
        counts.
        """
        self.elements[name] = []
        operands = [value.get_name() for value in node.inputs if hasattr(value, "get_name")]
        for position, result in enumerate(flatten_outputs(node.outputs)):
            part = name_of_tuple_element(name, result.indices)
            self.elements[name].append(part)
            storages = [s.returns[position] for s in subprograms if position < len(s.returns)]
            shared = [operands[s] for s in storages if isinstance(s, int) and s < len(operands)]
            if shared:
                yield Alias(at, part, shared[0])
            else:
                inside = [s for s in storages if isinstance(s, Make)]
                made = symbolic_sizes.largest(
                    [Make(at, part, *storage_bytes_and_expression(result)), *inside], part
                )
                yield Make(at, part, made.size_bytes, made.size)

    def workspace_of_subprograms(self, at: int, name: str, node: Any, subprograms: list[Subprogram]) -> Make:
        """Return the memory of the largest subprogram. For a while loop, add the results of the previous
        iteration.
        """
        makes = [subprogram.own for subprogram in subprograms]
        made = symbolic_sizes.largest(makes, f"{name}.own")
        if type(node).__name__ == "WhileLoop":
            held = [
                Make(at, "", *storage_bytes_and_expression(result))
                for result in flatten_outputs(node.outputs)
            ]
            made = symbolic_sizes.total([made, *held], made.name)
        return Make(at, made.name, made.size_bytes, made.size)

    def events_of_frees_in_branches(self, at: int, end: int) -> Iterator[Event]:
        """Yield the frees inside a call. If a branch frees a tensor, first yield another name for this
        tensor.

        The other branch may not free the tensor. So the additional name keeps the tensor alive until the
        program returns.
        """
        depth = 0
        for line in self.lines[at:end]:
            kind = type(line).__name__
            depth += (kind == "EnterSubgraphLine") - (kind == "ExitSubgraphLine")
            if kind in FREES:
                if depth and not getattr(line, "is_reused", False):
                    yield Alias(end - 1, f"{line.node.get_name()}.kept", line.node.get_name())
                yield from self.events_of_free(end - 1, line)


def read_subprogram(
    lines: list[Any], subprograms: dict[str, Subprogram], unknown: Callable[[str], None]
) -> Subprogram:
    """Read the body of a branch or loop. The body's graph must be Inductor's current graph (`V.graph`)."""
    graph = V.graph
    reader = WrapperProgramReader(lines, set(graph.get_output_names()), subprograms)
    events = list(reader.events(unknown))
    root: dict[str, Make | int] = {name: n for n, name in enumerate(graph.graph_inputs)}
    for event in events:
        if isinstance(event, Make):
            root[event.name] = event
        elif isinstance(event, Alias) and event.old in root:
            root[event.new] = root[event.old]
    constants = (ir.NoneAsConstantBuffer, ir.ShapeAsConstantBuffer)
    outputs = [None if isinstance(out, constants) else out.get_name() for out in graph.graph_outputs]
    returns = tuple(root.get(name) if name else None for name in outputs)
    kept = {made.name for made in returns if isinstance(made, Make)}
    sums = [
        Make(made.at, made.name, made.size_bytes, _replace_inner_symbols(made.size, reader.symbols))
        for made in live_bytes_per_launch(events, kept)
    ]
    return Subprogram(symbolic_sizes.largest(sums, ""), returns, bool(graph.mutated_inputs))


def _replace_inner_symbols(size: Any, symbols: WrapperSymbols) -> Any:
    """Replace symbols that have a value only inside a subprogram by limits for this value."""
    return None if size is None else sympy.sympify(symbols.replace_unbound_symbols(size, -1))
