"""Slots in an AOTAutograd FX graph that runs node by node: the inner program `eager`.

In: a graph and its kind. Out: its Schedule, and slot calls as nodes of the graph. A slot is a point before a
kernel where the program calls the engine.

A printed graph shows the slot calls. If a node makes a view of a tensor, the tensor counts as used by this
node, and so is resident. Otherwise its storage could be empty, and torch would raise an error.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

from teraio.formats.schedule import ProgramKind, Schedule
from teraio.ranks.collective_names import WAIT

from ..capture import aot, recompute_cut
from ..capture.gathered_weights import name_of_collective
from ..slots import library_workspace, symbolic_sizes
from ..slots.events import Alias, Event, Forget, Launch, Make, Signature
from ..slots.layout import lay_slots, live_bytes_per_launch
from .symbols import GraphSymbols

SlotFunction = Callable[..., None]

# Operators that return their argument or a view of it, although their schemas declare no alias.
UNDECLARED_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    *([torch.ops._c10d_functional.wait_tensor.default] if torch.distributed.is_available() else []),
}

log = logging.getLogger("teraio")


def is_strided_tensor(value: object) -> bool:
    """Return True for a tensor with a storage.

    A sparse tensor has no storage of its own, because it consists of two tensors.
    """
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def is_tensor_node(node: object) -> bool:
    return isinstance(node, torch.fx.Node) and is_strided_tensor(node.meta.get("val"))


def storage_key(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def storage_bytes_and_expression(value: torch.Tensor) -> tuple[int, Any]:
    """Return a pair for a fake tensor's storage: the number of bytes, and an expression for this number.

    If the size depends on symbols (dynamic shapes), the number is an estimate. Otherwise the expression is
    None.
    """
    return _hint_and_expression_of_size(value.untyped_storage().nbytes())


def dense_bytes_and_expression(value: torch.Tensor) -> tuple[int, Any]:
    """Return a pair for a dense copy of a fake tensor: the number of bytes, and an expression for it, or
    None.

    The size of a view's storage would be wrong for two reasons. The storage may be larger than a dense copy
    of the view. Its size may depend on symbols that are not inputs of the graph.
    """
    return _hint_and_expression_of_size(value.numel() * value.dtype.itemsize)


def _hint_and_expression_of_size(size: int | torch.SymInt) -> tuple[int, Any]:
    if isinstance(size, int):
        return size, None
    return symbolic_sizes.size_at_traced_shapes(size.node.expr, size.node.shape_env, 0), size.node.expr


def named_tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor in a node's value.

    A tensor in a tuple gets a name such as `split.1.0`. No variable has such a name, because of the dots.
    """
    if isinstance(value, torch.Tensor):
        if is_strided_tensor(value):
            yield name, value
    elif isinstance(value, tuple | list):
        for position, part in enumerate(value):
            yield from named_tensors_in(f"{name}.{position}", part)


def fake_value_of_node(node: torch.fx.Node) -> Any:
    """Return the value of a node, made of fake tensors.

    For some nodes, `meta` has no value. Then return a list: element n is the value of the node that takes
    element n of the node's result.
    """
    value = node.meta.get("val")
    taken = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if value is None and taken:
        return [fake_value_of_node(taken[n]) if n in taken else None for n in range(max(map(int, taken)) + 1)]  # type: ignore[arg-type]
    return value


class GraphReader:
    """A reader that turns the nodes of a graph into events (`slots/events.py`): new storages, their names,
    and kernels.

    The reader determines the storage of a node's value from the node's operator and its fake tensors.

    If `views_read_nothing` is True, an operator that makes a view is no kernel, so its argument may be
    evicted. This needs evicted storages that keep their sizes, as the observer makes them.
    """

    def __init__(self, gm: torch.fx.GraphModule, views_read_nothing: bool = False) -> None:
        self.gm = gm
        self.views_read_nothing = views_read_nothing
        self.nodes = list(gm.graph.nodes)
        self.symbols = GraphSymbols()
        self.owner: dict[int, str] = {}  # fake storage -> the first name of the storage
        self.dies: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.collectives = _collectives_by_wait(self.nodes)
        self.copies: dict[torch.fx.Node, str] = {}  # collective in flight -> name of its workspace
        last_user = {used: node for node in self.nodes for used in self._used_nodes(node)}
        for used, node in last_user.items():
            if node.op != "placeholder":
                self.dies.setdefault(node, []).append(used)

    def _used_nodes(self, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """Yield the nodes whose values this node uses, and the node itself. A wait also uses the inputs of
        its collective."""
        yield from node.all_input_nodes
        if node in self.collectives:
            yield from self.collectives[node].all_input_nodes
        yield node

    def events(self) -> Iterator[Event]:
        for at, node in enumerate(self.nodes):
            self.symbols.note_bound_symbols(at, node)
            if node.op == "placeholder" and is_tensor_node(node):
                self.owner.setdefault(storage_key(node.meta["val"]), node.name)
            elif node.op not in {"placeholder", "output", "get_attr"}:
                yield from self.events_of_call(at, node)
            if node.op != "output":
                for dead in self.dies.get(node, ()):
                    yield from (
                        Forget(at, name) for name, _ in named_tensors_in(dead.name, fake_value_of_node(dead))
                    )

    def events_of_call(self, at: int, node: torch.fx.Node) -> Iterator[Event]:
        value = fake_value_of_node(node)
        if node.target is operator.getitem:
            yield from self.events_of_getitem(at, node, value)
            return
        aliases: list[Alias] = []
        made: list[Make] = []
        source = source_of_view(node)
        for name, result in named_tensors_in(node.name, value):
            key = storage_key(result)
            if source is not None and (whole := storage_key(source.meta["val"])) in self.owner:
                self.owner.setdefault(key, self.owner[whole])
            if key in self.owner:
                aliases.append(Alias(at, name, self.owner[key]))
            else:
                self.owner[key] = name
                made.append(Make(at, name, *storage_bytes_and_expression(result)))
        if self.views_read_nothing and not made and source is not None and name_of_collective(node) != WAIT:
            yield from aliases
            return
        yield from made
        yield from self.events_of_kernel(at, node, made)
        yield from aliases

    def events_of_kernel(self, at: int, node: torch.fx.Node, made: list[Make]) -> Iterator[Event]:
        """Yield the launch of a kernel, and the begin and the end of its workspace. `made` has the storages
        that the kernel makes."""
        own = self.workspace_of_call(at, node, made)
        if own is not None:
            yield own
        reads = frozenset(n.name for n in node.all_input_nodes if is_tensor_node(n))
        writes = frozenset(m.name for m in made) | mutated_arguments(node)
        if node in self.collectives:
            yield Launch(at, node.name, reads, writes | reads, awaits=reads)
            if (copies := self.copies.pop(self.collectives[node], None)) is not None:
                yield Forget(at, copies)
        elif name_of_collective(node):
            yield Launch(at, node.name, reads, writes, begins=writes, collective=_collective_as_text(node))
            if own is not None:
                self.copies[node] = own.name
        else:
            yield Launch(at, node.name, reads, writes)
            if own is not None:
                yield Forget(at, own.name)

    def events_of_getitem(self, at: int, node: torch.fx.Node, value: Any) -> Iterator[Alias]:
        """Yield an alias: the node that takes an element of a tuple is another name for this element.

        The position in the tuple identifies the element. The fake storage does not, because for some
        operators the element in the tuple and the node that takes it have different fake storages.
        """
        source: Any = node.args[0]
        for name, result in named_tensors_in(node.name, value):
            element = f"{source.name}.{node.args[1]}{name.removeprefix(node.name)}"
            self.owner.setdefault(storage_key(result), name)
            yield Alias(at, name, element)

    def workspace_of_call(self, at: int, node: torch.fx.Node, made: list[Make]) -> Make | None:
        """Return the memory that a kernel allocates besides its results, or None if it allocates none.

        For a library kernel, this is the workspace: copies of tensors. An operator such as `cond` or `scan`
        runs other graphs, its bodies. For such an operator, this is the memory of the largest body.
        """
        bodies = [getattr(self.gm, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
        loops = any(word in str(node.target) for word in ("while", "scan"))
        sums: list[Make] = []
        for body in bodies:
            if isinstance(body, torch.fx.GraphModule):
                reader = GraphReader(body)
                events = list(reader.events())
                outputs: Any = body.graph.output_node().args[0]
                parts = outputs if isinstance(outputs, tuple | list) else [outputs]
                kept = {reader.owner[storage_key(n.meta["val"])] for n in parts if is_tensor_node(n)}
                sums += live_bytes_per_launch(events, () if loops else kept)
        largest = symbolic_sizes.largest(sums, f"{node.name}.own")
        if loops:  # an iteration's results live during the next iteration, and are then copied
            largest = symbolic_sizes.total([largest, *made, *made], largest.name)
        for copied in library_workspace.tensors_copied_by_kernel(node):
            sums.append(
                symbolic_sizes.total(
                    [Make(at, "", *dense_bytes_and_expression(tensor)) for tensor in copied], largest.name
                )
            )
            largest = symbolic_sizes.largest(sums, largest.name)
        return Make(at, largest.name, largest.size_bytes, largest.size) if sums else None


def _collective_as_text(node: torch.fx.Node) -> str:
    return library_workspace.collective_as_text(name_of_collective(node), (*node.args, *node.kwargs.values()))


def _collectives_by_wait(nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, torch.fx.Node]:
    """Return the nodes that wait for collectives, each with the node of its collective. If the result of a
    wait is used by another wait, or if the argument is no result of a collective, the wait itself counts."""
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        if name_of_collective(node) == WAIT:
            begun: Any = node.args[0]
            if begun.target is operator.getitem:
                begun = begun.args[0]
            found[node] = begun if name_of_collective(begun) else node
    return found


def source_of_view(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node of which this node is a view, or None if the node's operator makes no view.

    This function looks only at the operator. The fake tensors can mislead, because the view of a saved tensor
    may have its own fake storage (`detach` in the backward of logcumsumexp).
    """
    if node.target in UNDECLARED_VIEWS or getattr(node.target, "is_view", False):
        source = node.args[0] if node.args else None
        return source if isinstance(source, torch.fx.Node) and is_tensor_node(source) else None
    return None


def mutated_arguments(node: torch.fx.Node) -> frozenset[str]:
    """Return the names of the tensor arguments that the node's operator writes, according to its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return frozenset()
    written: set[str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value: Any = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            parts = value if isinstance(value, (tuple, list)) else [value]
            written.update(part.name for part in parts if is_tensor_node(part))
    return frozenset(written)


def build_program_signature(gm: torch.fx.GraphModule, kind: ProgramKind) -> Signature:
    graph = gm.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    returned: Any = graph.output_node().args[0]
    outputs = [node.name if is_tensor_node(node) else None for node in returned]
    held = aot.arguments_used_after_return(kind)
    cut = recompute_cut.read_cut_from_meta(gm)
    return Signature(
        kind=kind,
        graph=cut.graph if cut else "",
        nodes=cut.nodes if cut else (),
        possible=cut.recomputable_nodes if cut else frozenset(),
        arguments=tuple(
            (n.name, storage_bytes_and_expression(n.meta["val"])[0])
            for n in placeholders
            if is_tensor_node(n)
        ),
        outputs=tuple(outputs),
        saved=frozenset(range(aot.count_outputs_to_caller(kind, len(outputs)), len(outputs))),
        held=frozenset(placeholders[index].name for index in held if index < len(placeholders)),
        gradients=aot.gradient_edge_per_output(kind, graph.output_node()),
    )


def insert_slots(
    gm: torch.fx.GraphModule, kind: ProgramKind, views_read_nothing: bool = False
) -> tuple[Schedule, Callable[[SlotFunction], None]]:
    """Insert slot nodes into the graph: calls of the engine before each kernel.

    Return the schedule, and a function that takes the SlotFunction that the slot nodes then call. If
    `views_read_nothing` is True, there is no slot before an operator that only makes a view (`GraphReader`).
    """
    graph = gm.graph
    nodes = list(graph.nodes)
    by_name = {node.name: node for node in nodes}
    reader = GraphReader(gm, views_read_nothing)
    events = list(reader.events())
    schedule, places = lay_slots(build_program_signature(gm, kind), events, len(nodes) - 1)
    first = next(position for position, node in enumerate(nodes) if node.op != "placeholder")
    target: list[SlotFunction] = []

    def teraio_slot(index: int, tensors: Sequence[torch.Tensor], live_bytes: int | None = None) -> None:
        target[0](index, tensors, live_bytes)

    teraio_slot.__module__ = "teraio"
    for index, place in enumerate(places):
        at = max(first, place.at)
        with graph.inserting_before(nodes[at]):
            tensors = tuple(None if name is None else by_name[name] for name in place.names)
            live = reader.symbols.insert_size_node(graph, place.live, at)
            graph.call_function(teraio_slot, (index, tensors) if live is None else (index, tensors, live))
    log.debug(
        "teraio: pass slots: %s graph of %d nodes: %d slots for %d storages, %d nodes",
        kind,
        len(nodes),
        len(places),
        len(schedule.buffers),
        len(graph.nodes),
    )
    return schedule, target.append


def largest_kernel_bytes(backward: torch.fx.GraphModule) -> int:
    """Return the largest number of bytes that a kernel of the backward needs.

    The bytes are the tensors that the kernel reads or writes, and the bytes in use that cannot be evicted.
    """
    events = list(GraphReader(backward).events())
    schedule, _ = lay_slots(
        build_program_signature(backward, "backward"), events, len(backward.graph.nodes) - 1
    )
    touched = (
        sum(schedule.buffers[b].size_bytes for b, flags in zip(slot.buffers, slot.flags) if flags)
        for slot in schedule.slots[1:-1]
    )
    return max((size + slot.live_bytes for size, slot in zip(touched, schedule.slots[1:-1])), default=0)


class BoxedProgram:
    """A program that takes its arguments in a list and clears the list, so that the list keeps no tensor
    alive.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self._boxed_call = True  # an instance attribute, because AOTAutograd's wrapper loses class attributes

    def __call__(self, arguments: list[Any]) -> Any:
        return self.run(arguments)


def make_boxed_program(gm: torch.fx.GraphModule) -> BoxedProgram:
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return BoxedProgram(gm.forward)


def make_aot_backend(
    transform: Callable[[torch.fx.GraphModule, ProgramKind], None],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run,
    again: recompute_cut.ChooseRecompute = lambda graph: ((), 0),
) -> Callable[..., Any]:
    """Return a Dynamo backend that runs AOTAutograd's graphs node by node.

    `transform` changes each graph before it is compiled. `around` wraps the function that runs a program. For
    the hash of a joint graph, `again` returns a pair: the saved nodes to recompute, and the memory limit of a
    kernel in bytes.
    """
    from functorch.compile import min_cut_rematerialization_partition

    def make_graph_compiler(kind: ProgramKind) -> Callable[..., BoxedProgram]:
        def transform_and_box(gm: torch.fx.GraphModule, example_inputs: Any) -> BoxedProgram:
            transform(gm, kind)
            program = make_boxed_program(gm)
            program.run = around(program.run)
            return program

        return transform_and_box

    return aot_autograd(
        fw_compiler=make_graph_compiler("forward"),
        bw_compiler=make_graph_compiler("backward"),
        inference_compiler=make_graph_compiler("inference"),
        partition_fn=functools.partial(
            recompute_cut.cut_with_recompute, min_cut_rematerialization_partition, again, largest_kernel_bytes
        ),
    )
