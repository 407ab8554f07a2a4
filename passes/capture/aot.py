"""What AOTAutograd knows of a graph: which outputs reach the user, which arguments come back as views."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext

from teraio.formats.schedule import ProgramKind

# Where modules keep what they have; Dynamo goes through `__dict__` where a class has its own `__getattr__`.
UNSAID = {"_modules", "_parameters", "_buffers", "_orig_mod", "__dict__"}


def count_outputs_to_caller(kind: ProgramKind, outputs: int) -> int:
    """How many leading outputs leave to the caller; the rest are saved for the backward.

    A partitioned forward returns mutated inputs, user outputs and intermediate bases first: all of them are
    touched by AOTAutograd's own wrapper or by the user.
    """
    if kind != "forward":
        return outputs
    metadata = _traced_forward_metadata()
    return outputs if metadata is None else int(metadata.num_forward_returns)


def arguments_used_after_return(kind: ProgramKind) -> frozenset[int]:
    """Arguments that AOTAutograd touches after the program returned: it replays views of them, or writes to
    them what the program made of them, as to a running mean. They must be resident then."""
    metadata = _traced_forward_metadata()
    if metadata is None or kind == "backward":
        return frozenset()
    kept = {"alias_of_input", "is_input"}
    viewed = {
        info.base_idx
        for info in metadata.output_info
        if info.output_type.name in kept and info.base_idx is not None
    }
    return frozenset(viewed | set(metadata.mutated_inp_runtime_indices))


def gradient_edge_per_output(kind: ProgramKind, outputs: int) -> tuple[int, ...]:
    """Of a backward's outputs: which of the inputs that want a gradient each belongs to, -1 for those
    that are none. The edges of the autograd node that runs it are in the same order."""
    metadata = _traced_forward_metadata()
    if kind != "backward" or metadata is None or len(metadata.input_info) > outputs:
        return ()
    wanted = [info.requires_grad for info in metadata.input_info]
    positions = [sum(wanted[:at]) if wants else -1 for at, wants in enumerate(wanted)]
    return (*positions, *[-1] * (outputs - len(positions)))


def _traced_forward_metadata() -> Any:
    tracing = TracingContext.try_get()
    return tracing.fw_metadata if tracing is not None else None


def weight_and_buffer_names(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    """The user's names for the weights and buffers that enter a captured graph, such as
    `layers.0.mlp.up_proj.weight`; "" for other tensors."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    tensors = [node for node in placeholders if isinstance(node.meta.get("example_value"), torch.Tensor)]
    return tuple(_weight_name_from_source(node) for node in tensors)


def _weight_name_from_source(node: torch.fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    text = getattr(source, "name", None) or node.name
    text = text() if callable(text) else str(text)
    if "['_parameters']" not in text and "._parameters[" not in text and "._buffers[" not in text:
        return ""
    parts = [
        p for p in text.replace("[", ".").replace("]", "").replace("'", "").replace('"', "").split(".") if p
    ]
    return ".".join(p for p in parts[2:] if p not in UNSAID) or node.name
