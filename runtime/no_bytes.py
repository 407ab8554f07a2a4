"""Functions of torch that look at a tensor and not at its bytes: what is away need not come back for them."""

from __future__ import annotations

from typing import Any

import torch

GETTERS = """
    shape dtype device layout requires_grad is_leaf grad grad_fn ndim retains_grad output_nr name
    _version _base _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_sparse is_quantized
    is_meta is_nested is_mkldnn is_xpu is_mps is_sparse_csr is_vulkan is_ipu is_maia is_mtia itemsize
    nbytes _grad _grad_fn _cdata
"""
SETTERS = "grad requires_grad _backward_hooks _post_accumulate_grad_hooks _grad"
METHODS = """
    size dim numel nelement element_size stride storage_offset is_contiguous is_floating_point
    is_complex is_signed is_same_size is_set_to is_pinned is_conj is_neg is_inference is_distributed
    get_device ndimension _is_view requires_grad_ register_hook register_post_accumulate_grad_hook
    retain_grad has_names __len__ __hash__ dim_order _use_count is_shared
"""
FUNCTIONS = "is_floating_point is_complex numel is_same_size"


def _part(name: str, part: str) -> Any:
    return getattr(getattr(torch._C.TensorBase, name, None), part, None)


def _known() -> frozenset[Any]:
    found = [_part(name, "__get__") for name in GETTERS.split()]
    found += [_part(name, "__set__") for name in SETTERS.split()]
    found += [getattr(torch.Tensor, name, None) for name in METHODS.split()]
    found += [getattr(torch, name, None) for name in FUNCTIONS.split()]
    return frozenset(function for function in found if function is not None)


NO_BYTES = _known()
ENDS_A_GRADIENT = frozenset({_part("grad", "__set__")})  # and calls who waits for its end
