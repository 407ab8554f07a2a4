"""The cut of AOTAutograd's joint graph into forward and backward, with some saved tensors recomputed.

    torch's own cut          -> the saved nodes, and the saved nodes that could be recomputed
    nodes to recompute       -> torch's tags on the joint graph, and a second cut

Torch's partitioner reads the tags. MUST_RECOMPUTE marks each node to recompute, and the nodes that compute it
from saved tensors. MUST_SAVE marks each node that is still saved. Tags that the user set by activation
checkpointing are not changed. So a node that the user saves is never recomputed, and a node that the user
recomputes is never saved.

Some operators are never recomputed:

    random operators                                      the second run would give another result
    operators that write to their arguments
    operators that read an argument the graph writes
    collectives                                           (communication between processes)
    operators whose result's shape depends on data
    operators of other libraries                          they could be any of the above
"""

from __future__ import annotations

import hashlib
import logging
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from .gathered_weights import tag_gathered_weights

log = logging.getLogger("teraio")

KEY = "teraio_partition"  # key of the JointGraphCut in the `meta` of the forward and of the backward
BUILT_IN = {"aten", "prims"}
BY_USER = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}
ADDRESS = re.compile(r"0x[0-9a-f]+")

Cut = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
# Function from the hash of a joint graph to a pair: the names of the saved nodes to recompute, and the most
# bytes that a kernel may need.
ChooseRecompute = Callable[[str], tuple[Collection[str], int]]
# Function from a backward graph to the bytes that its largest kernel needs.
Needs = Callable[[torch.fx.GraphModule], int]


@dataclass(frozen=True, slots=True)
class JointGraphCut:
    """The result of a cut: the joint graph's hash, the forward's outputs, and the saved nodes that can be
    recomputed.
    """

    graph: str  # hash of the joint graph
    nodes: tuple[str, ...]  # for each output of the forward: the name of its node in the joint graph
    names: tuple[str, ...]  # names of nodes that can be recomputed; sorted, because caches hash `meta`

    @property
    def recomputable_nodes(self) -> frozenset[str]:
        return frozenset(self.names)


def read_cut_from_meta(gm: torch.fx.GraphModule) -> JointGraphCut | None:
    """Return the JointGraphCut in the `meta` of a forward or backward graph. Return None if the graph was not
    cut from a joint graph.

    For a backward graph, it has only the hash of the joint graph.
    """
    found = gm.meta.get(KEY)
    return found if isinstance(found, JointGraphCut) else None


def cut_with_recompute(
    cut: Cut, choose: ChooseRecompute, needs: Needs, joint: torch.fx.GraphModule, inputs: Any, **settings: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut a joint graph as `cut` does, and recompute the nodes that `choose` names.

    `choose` also returns a memory limit for a kernel. Recomputed tensors take memory in the backward, so the
    largest kernel of the backward may need more memory than before. If this memory exceeds the limit,
    recompute only every second of the named nodes. Halve again until the memory is within the limit.
    """
    tag_gathered_weights(joint.graph)
    graph = hash_joint_graph(joint.graph)
    forward, backward = cut(joint, inputs, **settings)
    returned = int(settings["num_fwd_outputs"])
    saved = as_torch_cuts = _saved_tensor_names(forward, returned)
    names, room_bytes = choose(graph)
    again = [node.name for node in joint.graph.nodes if node.name in saved and node.name in names]
    first, most_bytes = (forward, backward), max(room_bytes, needs(backward)) if again else 0
    while again:
        tagged = _tag_for_recompute(joint.graph, saved, again)
        made = cut(joint, inputs, **settings) if tagged else first
        for node in joint.graph.nodes:  # remove our tags; the cut has copied them into new graphs
            if node.name in tagged:
                node.meta.pop("recompute", None)
        if not tagged or needs(made[1]) <= most_bytes:
            forward, backward = made
            break
        log.info(
            "teraio: %d of %d activations are saved instead of recomputed: otherwise the largest kernel "
            "of the backward does not fit",
            -(-len(again) // 2),
            len(again),
        )
        again = again[1::2]
    saved = _saved_tensor_names(forward, returned)
    nodes = {node.name: node for node in joint.graph.nodes}
    written = _written_arguments(joint.graph)
    possible = frozenset(
        name
        for name in saved
        if name in nodes and _recompute_chain(nodes[name], saved - {name}, written) is not None
    )
    outputs = tuple(
        node.name if isinstance(node, torch.fx.Node) else "" for node in _outputs_of_forward_graph(forward)
    )
    log.debug(
        "teraio: pass recompute_cut: joint graph %s of %d nodes: %d tensors are saved, %d by torch's own "
        "cut; recomputed: %s",
        graph,
        len(nodes),
        len(saved),
        len(as_torch_cuts),
        ", ".join(sorted(as_torch_cuts - saved)) or "none",
    )
    forward.meta[KEY] = JointGraphCut(graph, outputs, tuple(sorted(possible)))
    backward.meta[KEY] = JointGraphCut(graph, (), ())
    return forward, backward


def hash_joint_graph(graph: torch.fx.Graph) -> str:
    """Hash the operators, their order and the shapes of their results.

    For the same graph, the hash is the same in every process.
    """
    digest = hashlib.sha256(b"teraio-joint-1")
    for node in graph.nodes:
        value = node.meta.get("val")
        about = [
            (tuple(map(str, part.shape)), str(part.dtype), str(part.device))
            for part in (value if isinstance(value, tuple | list) else [value])
            if isinstance(part, torch.Tensor)
        ]
        text = f"{node.format_node()} {about} {node.meta.get('recompute')}\n"
        digest.update(ADDRESS.sub("", text).encode())
    return digest.hexdigest()[:16]


def _outputs_of_forward_graph(forward: torch.fx.GraphModule) -> Any:
    return forward.graph.output_node().args[0]


def _saved_tensor_names(forward: torch.fx.GraphModule, returned: int) -> frozenset[str]:
    """Return the names of saved tensors: the forward returns them for the backward, and not to its caller."""
    nodes = [node for node in _outputs_of_forward_graph(forward) if isinstance(node, torch.fx.Node)]
    to_caller = set(_outputs_of_forward_graph(forward)[:returned])
    return frozenset(
        node.name
        for node in nodes
        if node.op == "call_function"
        and node not in to_caller
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def _written_arguments(graph: torch.fx.Graph) -> frozenset[torch.fx.Node]:
    """Return the arguments of the graph that one of its operators writes.

    The graph is functional, so its operators write to no other tensors.
    """
    return frozenset(
        node.args[0]
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.args
        and isinstance(node.args[0], torch.fx.Node)
    )


def _recompute_chain(
    wanted: torch.fx.Node, saved: Collection[str], written: Collection[torch.fx.Node]
) -> set[torch.fx.Node] | None:
    """Return the nodes that compute `wanted` from arguments and saved nodes.

    These nodes run again if `wanted` is recomputed. Return None if one of these nodes must not run twice.
    """
    chain: set[torch.fx.Node] = set()
    open_ = [wanted]
    while open_:
        node = open_.pop()
        if node in chain:
            continue
        if node.op == "placeholder":
            if "tangent" in str(node.target) or node in written:
                return None
        elif node.op == "get_attr" or (node.name in saved and node is not wanted):
            continue
        elif not _is_recomputable(node, node is wanted):
            return None
        else:
            chain.add(node)
            open_ += node.all_input_nodes
    return chain


def _is_recomputable(node: torch.fx.Node, wanted: bool) -> bool:
    tag = node.meta.get("recompute")
    if tag in BY_USER or (wanted and tag is not None):
        return False
    if node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
        return True  # an item of a tuple, or a number: recomputing it is always possible
    op = node.target
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace in BUILT_IN
        and not op._schema.is_mutable
        and not {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output} & set(op.tags)
        and torch.Tag.dynamic_output_shape not in op.tags
    )


def _tag_for_recompute(graph: torch.fx.Graph, saved: Collection[str], again: Collection[str]) -> set[str]:
    """Tag the nodes of `again` as MUST_RECOMPUTE, and the nodes that compute them from saved nodes.

    Tag the other saved nodes as MUST_SAVE. Return the names of the tagged nodes, or an empty set if no node
    of `again` can be recomputed.
    """
    nodes: Mapping[str, torch.fx.Node] = {node.name: node for node in graph.nodes}
    written, wanted = _written_arguments(graph), set(again)
    chains: dict[str, set[torch.fx.Node]] = {}
    while wanted:
        kept = set(saved) - wanted
        found = {name: _recompute_chain(nodes[name], kept, written) for name in wanted if name in nodes}
        chains = {name: chain for name, chain in found.items() if chain is not None}
        if chains.keys() == wanted:
            break
        wanted = set(chains)
    saves = [nodes[name] for name in saved if name in nodes and name not in wanted]
    tags = {node: CheckpointPolicy.MUST_SAVE for node in saves if node.target is not operator.getitem}
    tags |= {node: CheckpointPolicy.MUST_RECOMPUTE for chain in chains.values() for node in chain}
    tagged = [node for node in tags if wanted and "recompute" not in node.meta]
    for node in tagged:
        node.meta["recompute"] = tags[node]
    return {node.name for node in tagged}
