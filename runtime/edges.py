"""Which weights eager code has in a graph of autograd's.

Where several places of one graph use a weight, autograd adds their gradients up on the way to it, in C++, and
asks no one. A gradient that a program made may leave before it is given over only if no such graph is there.

A graph is there as long as its nodes are. So each node that eager code makes of a weight gets a hook that no
one else holds: it does nothing, and it ends when the node does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch._C import DisableTorchFunctionSubclass

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


def edges_of(used: list[torch.Tensor], made: Any, given: Any) -> Edges:
    """What a function of torch that was `given` these, and so `used` weights, put into a graph: what it
    `made`, or, if that is nothing, what it changed."""
    if not torch.is_grad_enabled():
        return []
    with DisableTorchFunctionSubclass():
        if not any(tensor.requires_grad for tensor in used):
            return []
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        leaves = list(_leaves(made))
        if not all(isinstance(leaf, PLAIN) for leaf in leaves):
            return None
        if made is None:
            leaves = list(_leaves(given))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        nodes = {id(node): node for tensor in tensors if (node := tensor.grad_fn) is not None}
        return [_hooked(node) for node in nodes.values()]


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
