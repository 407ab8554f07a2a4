"""Operators that the stand-in composes of others give what torch foretells of CUDA's, as Inductor expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import standin  # noqa: F401
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten


def told(results: Any) -> list[tuple[Any, ...]]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [(v.shape, v.stride(), v.dtype) for v in leaves if isinstance(v, torch.Tensor)]


def is_foretold(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the operator gives, in the form that torch foretells."""
    found = operator(*arguments)
    fake = FakeTensorMode()
    with fake:
        foretold = operator(*torch.utils._pytree.tree_map_only(torch.Tensor, fake.from_tensor, arguments))
    assert told(found) == told(foretold), (operator, told(found), told(foretold))
    return found


def check_attention() -> None:
    shape = (2, 4, 48, 64)
    for rows_first in (False, True):
        of = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        query = key = value = of.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else of
        out, sums, *_, rows, columns, seed, unused, _ = is_foretold(
            aten._scaled_dot_product_flash_attention, query, key, value, 0.0, True
        )
        known = (query, key, value, out, sums, None, None, rows, columns, 0.0, True, seed, unused)
        is_foretold(aten._scaled_dot_product_flash_attention_backward, torch.ones_like(out), *known)


def check_norms_and_dropout() -> None:
    of, weight = torch.randn(4, 6, 32, device="cuda"), torch.randn(32, device="cuda")
    _, root = is_foretold(aten._fused_rms_norm, of, [32], weight, 1e-6)
    is_foretold(aten._fused_rms_norm_backward, of, of, [32], root, weight, [True, True])
    is_foretold(aten.native_dropout, of, 0.5, True)
