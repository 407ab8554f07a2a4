"""Metadata of AOTAutograd about a graph: outputs that reach the user, arguments used after the call."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext

from teraio.formats.schedule import ProgramKind

# Attributes that hold the children of a module. They are omitted from the names of weights. Dynamo's source
# uses `__dict__` if a class has its own `__getattr__`.
OMITTED_PARTS = {"_modules", "_parameters", "_buffers", "_orig_mod", "__dict__"}


def count_outputs_to_caller(kind: ProgramKind, outputs: int) -> int:
    """Return the number of leading outputs that the caller receives. The backward uses the other outputs.

    A partitioned forward returns mutated inputs, user outputs and intermediate bases first. AOTAutograd's own
    wrapper or the user touches all of these outputs.
    """
    if kind != "forward":
        return outputs
    metadata = _traced_forward_metadata()
    return outputs if metadata is None else int(metadata.num_forward_returns)


def arguments_used_after_return(kind: ProgramKind) -> frozenset[int]:
    """Return the positions of arguments that AOTAutograd touches after the program has returned.

    AOTAutograd then replays views of these arguments, or writes a result of the program into them, for
    example a running mean. The arguments must be resident at that time.
    """
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
    """Return, for each output of a backward, the edge of the output's gradient, or -1 for no gradient.

    The edge is the number of the input whose gradient the output is. This number counts only inputs that
    require a gradient. The edges of the autograd node that runs the backward are in the same order.
    """
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
    """Return the names of a captured graph's weights and buffers in the user's model.

    An example is `layers.0.mlp.up_proj.weight`. Inputs of the graph that are no weight or buffer get the name
    "".
    """
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
    return ".".join(p for p in parts[2:] if p not in OMITTED_PARTS) or node.name
