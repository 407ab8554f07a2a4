"""Operators that only CUDA has kernels for. They are composed of operators that the stand-in computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Keep the library alive: when it is freed, torch removes its operators.
LIBRARY = torch.library.Library("aten", "IMPL")


def on_cuda(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        LIBRARY.impl(name, function, "CUDA", allow_override=True)
        return function

    return register


@on_cuda("native_dropout")
def native_dropout(tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Compute dropout with the CUDA device's random numbers. The CPU's kernel would use the CPU's random
    numbers instead.
    """
    if train is False or p == 0:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    kept = torch.empty_like(tensor, dtype=torch.bool).bernoulli_(1 - p)
    return tensor * kept * (1 / (1 - p) if p < 1 else 0.0), kept


@on_cuda("_fused_rms_norm")
def rms_norm(
    tensor: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    eps = torch.finfo(tensor.dtype).eps if eps is None else eps
    wide = tensor.float()
    dims = tuple(range(tensor.dim() - len(normalized_shape), tensor.dim()))
    root = torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
    normal = wide * root
    if weight is not None:
        normal = normal * weight.float()
    return normal.to(tensor.dtype), root


@on_cuda("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: Tensor, tensor: Tensor, shape: list[int], root: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    inner = tuple(range(tensor.dim() - len(shape), tensor.dim()))
    normal = tensor.float() * root
    scaled = grad.float() if weight is None else grad.float() * weight.float()
    of_tensor = (scaled - normal * (scaled * normal).mean(inner, keepdim=True)) * root
    of_weight = None
    if mask[1] and weight is not None:
        outer = tuple(range(tensor.dim() - len(shape)))
        of_weight = (grad.float() * normal).sum(outer).to(weight.dtype)
    return (of_tensor.to(tensor.dtype) if mask[0] else None), of_weight


# ---- attention


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float, bias: Tensor | None = None) -> Tensor:
    scores = torch.matmul(query.float(), key.float().transpose(-2, -1)) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result of attention, and for each row the logarithm of the sum of exponentials."""
    scores = _scores(query, key, causal, scale, bias)
    sums = torch.logsumexp(scores, -1)
    return _as(query, torch.matmul((scores - sums.unsqueeze(-1)).exp(), value.float())), sums


def _as(model: Tensor, values: Tensor) -> Tensor:
    """Return `values` in the dtype and memory layout of `model`, because CUDA's kernels return this dtype and
    layout.
    """
    return torch.empty_like(model).copy_(values)


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_scores(query, key, causal, scale) - sums.unsqueeze(-1)).exp()
    wide = grad.float()
    of_value = torch.matmul(weights.transpose(-2, -1), wide)
    of_weights = torch.matmul(wide, value.float().transpose(-2, -1))
    of_scores = weights * (of_weights - (wide * out.float()).sum(-1, keepdim=True)) * scale
    of_query = torch.matmul(of_scores, key.float())
    of_key = torch.matmul(of_scores.transpose(-2, -1), query.float())
    return _as(query, of_query), _as(key, of_key), _as(value, of_value)


def _no_dropout(p: float) -> None:
    if p > 0:
        raise NotImplementedError("the stand-in has no attention with dropout")


def _seed(query: Tensor) -> Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=query.device)


@on_cuda("_scaled_dot_product_flash_attention")
def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _no_dropout(dropout_p)
    out, sums = _attention(query, key, value, is_causal, _scale(query, scale))
    # This result is never read, but Inductor checks its shape.
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    debug = torch.empty(0, dtype=query.dtype, device=query.device)
    return out, sums, None, None, query.shape[2], key.shape[2], _seed(query), unused, debug


@on_cuda("_scaled_dot_product_flash_attention_backward")
def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _attention_backward(grad_out, query, key, value, out, logsumexp, is_causal, _scale(query, scale))
