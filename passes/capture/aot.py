"""Metadata of AOTAutograd about a graph: outputs that reach the user, and arguments that are used after the
call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, SubclassGetAttrAOTOutput
from torch._guards import TracingContext

from teraio.formats.schedule import ProgramKind

# Attributes of modules that Dynamo's names of weights contain, but the user's names do not. Dynamo's name
# contains `__dict__` if a class has its own `__getattr__`.
OMITTED_PARTS = {"_modules", "_parameters", "_buffers", "_orig_mod", "__dict__"}


def count_outputs_to_caller(kind: ProgramKind, outputs: int) -> int:
    """Return the number of leading outputs that the caller receives. The remaining outputs are only for the
    backward.

    The first outputs of a forward are mutated inputs, user outputs and intermediate bases (of views).
    AOTAutograd's wrapper or the user uses all of these.
    """
    if kind != "forward":
        return outputs
    metadata = _traced_forward_metadata()
    return outputs if metadata is None else int(metadata.num_forward_returns)


def arguments_used_after_return(kind: ProgramKind) -> frozenset[int]:
    """Return the positions of arguments that AOTAutograd reads or writes after the program has returned.

    AOTAutograd then makes views of these arguments again, or copies results of the program into them (for
    example a running mean). So the arguments must be resident after the program has returned.
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


def gradient_edge_per_output(kind: ProgramKind, output: torch.fx.Node) -> tuple[int, ...]:
    """Return an edge number for each output of a backward, or -1 if the output is no gradient. `output` is
    the output node of the backward's graph.

    Edge number n, counted from 0, means that the output is the gradient of the n-th input that requires a
    gradient. The autograd node that runs the backward has its edges in this order. The gradient of a DTensor
    is two outputs with one edge number: its local tensor, and its mesh.
    """
    returned, about = output.args[0], output.meta.get("desc", ())
    if kind != "backward" or len(about) != len(returned):  # type: ignore[arg-type]
        return ()
    inputs = [_input_of_gradient(each) for each in about]
    edges = {given: edge for edge, given in enumerate(dict.fromkeys(filter(None, inputs)))}
    return tuple(edges.get(given, -1) for given in inputs)


def _input_of_gradient(about: Any) -> Any:
    """Return AOTAutograd's description of the input that has this output as its gradient. Return None if the
    output is no gradient. `about` is AOTAutograd's description of the output."""
    while isinstance(about, SubclassGetAttrAOTOutput):
        about = about.base
    return about.grad_of if isinstance(about, GradAOTOutput) else None


def _traced_forward_metadata() -> Any:
    tracing = TracingContext.try_get()
    return tracing.fw_metadata if tracing is not None else None


def weight_and_buffer_names(gm: torch.fx.GraphModule) -> tuple[str, ...]:
    """Return a name for each tensor input of a captured graph.

    A weight or buffer gets its name in the user's model, for example `layers.0.mlp.up_proj.weight`. Any other
    input gets the name "".
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
