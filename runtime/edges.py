"""Which weights eager code has in a graph of autograd's.

Where several places of one graph use a weight, autograd adds their gradients up on the way to it, in C++, and
asks no one. A gradient that a program made may leave before it is given over only if no such graph is there.

A graph is there as long as its nodes are. So each node that eager code makes of a weight gets a hook that no
one else holds: it does nothing, and it ends when the node does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

# Of these it can be seen whether they are in a graph. Of anything else it is not known.
PLAIN = (
    torch.Tensor,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
)


class Edge:
    """A hook of a node."""

    __slots__ = ("__weakref__",)

    def __call__(self, *_: Any) -> None:
        return None


Edges = list[ReferenceType[Edge]] | None  # None: it is not known


@dataclass(frozen=True, slots=True)
class Call:
    """Of a function of torch."""

    made: Any
    given: Any
    first: int  # the nodes that it put into a graph have this number in their thread, or a higher one


def edges_of(used: Iterable[torch.Tensor], call: Call) -> Edges:
    """What a call that used these weights put into a graph."""
    if not torch.is_grad_enabled():
        return []
    with DisableTorchFunctionSubclass():
        if not any(tensor.requires_grad for tensor in used):
            return []
        tensors = tensors_of(call)
        if tensors is None:
            return None
        nodes = {id(node): node for tensor in tensors if (node := tensor.grad_fn) is not None}
        return [_hooked(node) for node in nodes.values()]


def tensors_of(call: Call) -> list[torch.Tensor] | None:
    """Which it made, or, if that is nothing, which it changed. None: it is not known."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    leaves = list(_leaves(call.made))
    if not all(isinstance(leaf, PLAIN) for leaf in leaves):
        return None
    if call.made is None:
        leaves = list(_leaves(call.given))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def end_of_graphs(weight: torch.Tensor) -> Any:
    """The node at which graphs of a weight end, which exists from now on, as long as this is held. None if
    it has none, or that cannot be told here."""
    if not (weight.requires_grad and weight.is_leaf) or torch.is_inference_mode_enabled():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    with torch.enable_grad(), DisableTorchFunction(), torch._C._DisableTorchDispatch():  # no mode sees it
        view = weight.view_as(weight)
        return view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None


def added_up(outputs: Iterable[Any]) -> set[int]:
    """Return the ids of the leaves at which several edges of the graph of these outputs end.

    Autograd adds up their gradients before their hooks run. Visits each node of the graph once."""
    ends: Counter[int] = Counter()
    ends_of = (o.grad_fn if isinstance(o, torch.Tensor) else o.node for o in outputs)  # or gradient edges
    waiting = [node for node in ends_of if node is not None]
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                ends[id(leaf)] += 1
            elif node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return {leaf for leaf, count in ends.items() if count > 1}


def _hooked(node: Any) -> ReferenceType[Edge]:
    edge = Edge()
    node.register_hook(edge)
    return ref(edge)


def alive(edges: list[ReferenceType[Edge]]) -> list[ReferenceType[Edge]]:
    return [edge for edge in edges if edge() is not None]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple | set):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
