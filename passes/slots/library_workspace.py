"""Workspace of library kernels on CPU. No tensor of the program shows this memory.

In: a node. Out: the tensors that the node's kernel copies. The numbers of copies were measured with a
counting allocator. Convolutions copy inputs and results into layouts of their own. Three kinds of
convolutions make more copies: convolutions with few channels, convolutions with groups, and transposed
convolutions. For 48 of 60 random shapes the real workspace was at most this estimate. For the other 12 shapes
the real workspace was at most 0.7 MB larger. The engine's reserve covers this excess.
"""

from __future__ import annotations

from typing import Any

import torch

FEW = 16  # limit for few channels; layouts pad the channels to this number


def tensors_copied_by_kernel(node: torch.fx.Node) -> list[list[torch.Tensor]]:
    """Return lists of fake tensors.

    A list has each tensor as often as the kernel copies the tensor. The kernel needs the bytes of the largest
    list.
    """
    value = node.meta.get("val")
    first = next((v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)), None)
    if first is None or first.device.type != "cpu":
        return []
    match str(node.target).removesuffix(".default"):
        case "aten.convolution":
            x, weight, *_, transposed, _, _ = _argument_values(node)
            return [[x, weight, first, first, *[first] * bool(transposed)]]
        case "aten.convolution_backward":
            grad, x, weight, *_, groups, _ = _argument_values(node)
            more = [weight] * (4 if groups != 1 else 1) + [grad] * (x.shape[1] in range(FEW))
            return [[x, x, *more], [x, grad, *more]]
        case "aten.native_batch_norm_backward":
            return [[_argument_values(node)[1]]]
        case "aten.native_dropout" | "aten.native_dropout_backward" | "aten._fft_r2c" | "aten._fft_c2c":
            return [[first]]
    return []


def _argument_values(node: torch.fx.Node) -> list[Any]:
    return [
        argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument for argument in node.args
    ]
