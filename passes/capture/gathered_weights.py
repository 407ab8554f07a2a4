"""Gathered weights in a joint graph. They are not saved for the backward, which gathers them again.

    shard -> cast, pad -> all_gather -> wait -> cut off the padding, view, transpose -> matmul
    [------------------------- runs again in the backward --------------------------]

A rank keeps only its own shard of a weight. If the forward saved the gathered weights, each rank would keep
all weights, and the engine would evict and fetch them.

All ranks have the same joint graph, so all ranks gather again in the same order.
"""

from __future__ import annotations

import operator

import torch
from torch.utils.checkpoint import CheckpointPolicy

from teraio.ranks.collective_names import FUNCTIONAL, GATHERS, WAIT

# Operators that change only the type, the layout or the size of a tensor.
PASSES_ON = {
    "prims.convert_element_type",
    *("aten._to_copy", "aten._unsafe_view", "aten.alias", "aten.as_strided", "aten.cat", "aten.chunk"),
    *("aten.clone", "aten.constant_pad_nd", "aten.copy", "aten.detach", "aten.expand", "aten.fill"),
    *("aten.lift_fresh_copy", "aten.narrow", "aten.new_empty", "aten.permute", "aten.reshape"),
    *("aten.select", "aten.slice", "aten.split", "aten.split_with_sizes", "aten.squeeze", "aten.stack"),
    *("aten.t", "aten.transpose", "aten.unbind", "aten.unsqueeze", "aten.view"),
}


def tag_gathered_weights(graph: torch.fx.Graph) -> None:
    """Tag the gathers of a joint graph's arguments as MUST_RECOMPUTE, with the operators that only pass the
    gathered bytes on. Tags that the user has set are not changed."""
    from_arguments: set[torch.fx.Node] = set()  # computed from arguments by operators of PASSES_ON
    gathered: set[torch.fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            if "tangent" not in str(node.target) and isinstance(node.meta.get("val"), torch.Tensor):
                from_arguments.add(node)
        elif node.op != "call_function":
            continue
        elif name_of_collective(node) in GATHERS:
            if all(each in from_arguments for each in inputs):
                gathered.add(node)
        elif inputs and all(each in from_arguments for each in inputs):
            if _passes_on(node):
                from_arguments.add(node)
        elif any(each in gathered for each in inputs):
            known = all(each in from_arguments or each in gathered for each in inputs)
            if known and (_passes_on(node) or name_of_collective(node) == WAIT):
                gathered.add(node)
    tagged, open_ = set(gathered), list(gathered)
    while open_:  # also tag the operators before the gathers
        before = [n for n in open_.pop().all_input_nodes if n in from_arguments and n.op != "placeholder"]
        open_ += [node for node in before if node not in tagged]
        tagged.update(before)
    for node in tagged:
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)


def name_of_collective(node: torch.fx.Node) -> str:
    """Return the operator of a node that begins a collective or waits for one, without its namespace. Return
    "" for any other node."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == FUNCTIONAL:
        return str(target._schema.name.partition("::")[2])
    return ""


def _passes_on(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and str(target.overloadpacket) in PASSES_ON
