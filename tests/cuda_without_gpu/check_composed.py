"""Checks of the operators in composed.py, which are made of other operators.

Their results must have the shapes, strides and dtypes that torch predicts for CUDA, because Inductor relies
on these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import standin  # noqa: F401
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


def forms(results: Any) -> list[tuple[Any, ...]]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [(v.shape, v.stride(), v.dtype) for v in leaves if isinstance(v, torch.Tensor)]


def has_predicted_form(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Check that the operator's results have the shapes, strides and dtypes that fake tensors predict. Return
    the results.
    """
    found = operator(*arguments)
    fake = FakeTensorMode()
    with fake:
        predicted = operator(*torch.utils._pytree.tree_map_only(torch.Tensor, fake.from_tensor, arguments))
    assert forms(found) == forms(predicted), (operator, forms(found), forms(predicted))
    return found


def check_attention() -> None:
    shape = (2, 4, 48, 64)
    for rows_first in (False, True):
        of = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        query = key = value = of.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else of
        out, sums, *_, rows, columns, seed, unused, _ = has_predicted_form(
            aten._scaled_dot_product_flash_attention, query, key, value, 0.0, True
        )
        known = (query, key, value, out, sums, None, None, rows, columns, 0.0, True, seed, unused)
        has_predicted_form(aten._scaled_dot_product_flash_attention_backward, torch.ones_like(out), *known)


def check_norms_and_dropout() -> None:
    of, weight = torch.randn(4, 6, 32, device="cuda"), torch.randn(32, device="cuda")
    _, root = has_predicted_form(aten._fused_rms_norm, of, [32], weight, 1e-6)
    has_predicted_form(aten._fused_rms_norm_backward, of, of, [32], root, weight, [True, True])
    has_predicted_form(aten.native_dropout, of, 0.5, True)
