"""Costs of operators: floating point operations and bytes, from the shapes of fake tensors.

Torch's own formulas (`torch.utils.flop_counter`) count the operations. The bytes are the sum over all tensors
that an operator reads and writes. A view counts with its own elements, and not with its whole storage. A
lookup table counts with only the rows that the operator reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from .roofline import Rates

aten = torch.ops.aten

HALF_BYTES = 2  # processors have faster units for elements of at most this number of bytes

# Lookups: operators that read only a part of their first argument, with as many bytes as their result.
LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.slice, aten.select}

# Torch has no formula for the operators on the left. The formulas of the operators on the right apply.
SAME_FLOP = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


@dataclass(frozen=True, slots=True)
class Speeds:
    """The rates of a processor: `half` for operands of at most two bytes, `full` for wider operands."""

    half: Rates
    full: Rates

    def duration_ns(self, cost: Cost) -> int:
        if not cost.launches:
            return 0
        return (self.half if cost.half else self.full).duration_ns(cost.flop, cost.moved_bytes)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call of an operator."""

    flop: int
    moved_bytes: int
    half: bool = False
    launches: bool = True  # False for a view, which launches no kernel


NOTHING = Cost(0, 0, launches=False)


def cost_of_call(target: Any, args: Any, kwargs: Any, result: Any) -> Cost:
    """Return the cost of one call of the operator `target`. Arguments and result are fake tensors."""
    given, made = list(strided_tensors_in((args, kwargs))), list(strided_tensors_in(result))
    if not made or (_has_only_views(given, made) and not _is_mutating(target)):
        return NOTHING
    packet = getattr(target, "overloadpacket", target)
    sizes = [tensor.numel() * tensor.element_size() for tensor in given]
    out_bytes = sum(tensor.numel() * tensor.element_size() for tensor in made)
    if packet in LOOKUPS and sizes:
        sizes[0] = min(sizes[0], out_bytes)
    widest = max((t.element_size() for t in given if t.is_floating_point()), default=4)
    return Cost(_flop_of_call(packet, args, kwargs, result), sum(sizes) + out_bytes, widest <= HALF_BYTES)


def costs_of_nodes(gm: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, list[Cost]]]:
    """Yield each node of a graph with the costs of its calls.

    Some operators (`cond`, `scan`) run other graphs. The costs of such an operator are the costs of all calls
    in these graphs, as if each graph ran one time.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        bodies = [getattr(gm, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
        inside = [
            c for body in bodies if isinstance(body, torch.fx.GraphModule) for _, c in costs_of_nodes(body)
        ]
        own = cost_of_call(node.target, args, kwargs, node.meta.get("val"))
        yield node, [cost for costs in inside for cost in costs] or [own]


def strided_tensors_in(value: Any) -> Iterator[torch.Tensor]:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return (leaf for leaf in leaves if leaf.layout == torch.strided)


def _has_only_views(given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    return all(tensor.untyped_storage()._cdata in storages for tensor in made)


def _is_mutating(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _flop_of_call(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = flop_registry.get(SAME_FLOP.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
