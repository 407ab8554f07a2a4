"""More operations on a tensor, which use autograd or function transforms, or act below the tensor's Python
class.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import library
from torch.utils.checkpoint import checkpoint
from touch_list import (
    ARITHMETIC,
    COLUMNS,
    COPIES,
    READS,
    ROWS,
    VIEWS,
    WRITES,
    Operation,
    Side,
    quietly,
    saved,
)


def gradients(out: torch.Tensor, s: Side) -> Any:
    """Return the gradients of the inputs that require gradients. `w` and `v` may require none."""
    inputs = [t for t in (s.w, s.v, s.y) if t.requires_grad and t.is_leaf]
    return torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0]


@library.custom_op("teraio_tests::doubling", mutates_args=())
def doubling(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=False)


def lstm(s: Side) -> Any:
    module = seeded(lambda: torch.nn.LSTM(COLUMNS, ROWS // 4))
    module.weight_ih_l0 = as_parameter(s.w)
    return module(s.y)[0]


def attention(s: Side) -> Any:
    """Run attention in evaluation mode, which uses a separate C++ path in torch."""
    module = seeded(lambda: torch.nn.MultiheadAttention(COLUMNS, 4)).eval()
    module.out_proj.weight = as_parameter(s.w)
    return quietly(lambda: module(s.x, s.x, s.x)[0])


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(5)
    return make()


def with_backward(s: Side, out: torch.Tensor) -> Any:
    """Run a backward that adds to `.grad` of the leaves, as in training."""
    out.square().sum().backward()
    found = [t.grad.clone() for t in (s.w, s.v, s.y) if t.is_leaf and t.grad is not None]
    s.y.grad = None
    return found


def stored(s: Side) -> Any:
    return torch.nn.utils.parameters_to_vector(trained(s))


def loaded(s: Side) -> Any:
    halved = {name: value * 0.5 for name, value in s.layer.state_dict().items() if name != "index"}
    s.layer.load_state_dict(halved, strict=False)
    return [value.clone() for value in s.layer.state_dict().values()]


def backward_of(s: Side, gradient: torch.Tensor) -> Any:
    (s.y[:1].expand(ROWS, -1) * 2).backward(gradient)
    found, s.y.grad = s.y.grad, None
    return found


def eager_backward(s: Side) -> Any:
    """Run the layer as plain Python under eager autograd. The backward adds to existing gradients."""
    s.layer.zero_grad(set_to_none=False)
    s.layer.plain(s.y).square().sum().backward()
    s.layer.plain(s.y).square().sum().backward()
    found = [p.grad.clone() for p in s.layer.parameters() if p.grad is not None]
    s.y.grad = None
    return found


def trained(s: Side) -> list[torch.nn.Parameter]:
    return [p for p in s.layer.parameters() if p.requires_grad]


def vectors(s: Side) -> Any:
    return torch.nn.utils.vector_to_parameters(stored(s) * 2, trained(s))


def unscaled(s: Side) -> Any:
    found, scale = torch.zeros(()), torch.tensor(0.5)
    torch._amp_foreach_non_finite_check_and_unscale_([s.w.detach()], found, scale)
    return found


def hooked(s: Side) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return gradients((s.w * s.y.sum()).exp(), s)


def checkpointed(s: Side) -> Any:
    return gradients(checkpoint(lambda w, y: (y @ w.t()).exp(), s.w, s.y, use_reentrant=False), s)


def dual(s: Side) -> Any:
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        return forward.unpack_dual(forward.make_dual(s.w.detach(), s.v.detach()).sin())


AUTOGRAD: dict[str, Operation] = {
    "linear": lambda s: F.linear(s.y, s.w),
    "linear without autograd": lambda s: quietly(lambda: F.linear(s.y, s.w)),
    "linear, backward": lambda s: gradients(F.linear(s.y, s.w), s),
    "saved, then backward": lambda s: with_backward(s, (s.w * s.y.sum()).exp() * s.v),
    "embedding": lambda s: gradients(F.embedding(torch.tensor([1, 3, 3]), s.w) * s.y.sum(), s),
    "layer_norm": lambda s: gradients(F.layer_norm(s.y, (COLUMNS,), s.w[0], s.v[1]), s),
    "conv": lambda s: gradients(F.conv1d(s.y[None].expand(2, -1, -1), s.w[:4, :35].reshape(4, 5, 7)), s),
    "attention": lambda s: F.scaled_dot_product_attention(s.x[None], s.w[None], s.v[None]),
    "LSTM": lstm,
    "MultiheadAttention": attention,
    "pad_sequence": lambda s: torch.nn.utils.rnn.pad_sequence([s.x, s.w]),
    "collate": lambda s: torch.utils.data.default_collate([s.w.detach(), s.v.detach()]),
    "custom operator": lambda s: doubling(s.w),
    "distribution": lambda s: torch.distributions.Normal(s.w, 1.0).log_prob(s.x),
    "Function": lambda s: gradients(Doubled.apply(s.w) * s.y.sum(), s),
    "checkpoint": checkpointed,
    "gradient given": lambda s: torch.autograd.grad(s.y @ s.x.t() @ s.x, s.y, s.w.detach()[:5]),
    "backward of it": lambda s: backward_of(s, s.w.detach()),
    "backward of itself": lambda s: backward_of(s, s.w),
    "grad of itself": lambda s: torch.autograd.grad(s.y[:1].expand(ROWS, -1) * 2, s.y, s.w),
    "func.grad": lambda s: torch.func.grad(lambda w: (w * s.x).sum())(s.w),
    "func.vjp": lambda s: torch.func.vjp(lambda w: w * s.x, s.w)[1](s.v),
    "func.jvp": lambda s: torch.func.jvp(lambda w: w.sin(), (s.w.detach(),), (s.v.detach(),)),
    "func.jvp of itself": lambda s: torch.func.jvp(lambda w: w.sin(), (s.w,), (s.v,)),
    "func.jacrev": lambda s: torch.func.jacrev(lambda row: row.square().sum())(s.w[0]),
    "jacobian": lambda s: torch.autograd.functional.jacobian(lambda w: w.square().sum(), s.w),
    "vmap": lambda s: torch.vmap(lambda row: row.sum() * 2)(s.w),
    "vmap, closed over": lambda s: torch.vmap(lambda row: (s.w @ row).sum())(s.x),
    "functional_call": lambda s: torch.func.functional_call(s.layer.head, {"weight": s.w}, (s.y,)),
    "stack_module_state": lambda s: torch.func.stack_module_state([s.layer.head, s.other.head])[0],
    "hessian": lambda s: torch.func.hessian(lambda t: (t.square() * s.w[0, :3]).sum())(s.x[0, :3]),
    "dual numbers": dual,
    "eager backward": eager_backward,
    "clip_grad_norm_": lambda s: torch.nn.utils.clip_grad_norm_(list(s.layer.parameters()), 0.01),
    "clip_grad_value_": lambda s: torch.nn.utils.clip_grad_value_(list(s.layer.parameters()), 1e-4),
    "get_total_norm": lambda s: torch.nn.utils.get_total_norm([s.w, s.v, s.x]),
    "parameters_to_vector": stored,
    "vector_to_parameters": vectors,
    "state_dict": lambda s: list(s.layer.state_dict().values()),
    "state_dict, saved": lambda s: list(saved(s.layer.state_dict()).values()),
    "load_state_dict": loaded,
    "zero_grad": lambda s: s.layer.zero_grad(set_to_none=False),
    "unscale": unscaled,
    "swa": lambda s: torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)([s.x.clone()], [s.w], 1),
    "saved hooks": hooked,
}


def by_pointer(s: Side) -> Any:
    memory = (ctypes.c_float * 4).from_address(s.w.data_ptr())
    memory[1] = 2.5
    return list(memory)


def exchanged(s: Side) -> Any:
    torch.utils.swap_tensors(s.w, like(s.w, s.x))
    return s.w.sum()


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    found = other.clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(found, tensor.requires_grad)
    return found


def assigned(s: Side) -> Any:
    s.w.data = s.x * 2
    return s.w.sum()


def assigned_to_another(s: Side) -> Any:
    target = torch.zeros(1)
    target.data = s.w.detach()
    return target.sum()


def two_names(s: Side) -> Any:
    s.w.data = s.v.detach()
    s.w.detach().add_(1)
    return s.v.sum()


# Torch refuses to swap a tensor that has weak references. The engine holds weak references to tensors.
REFUSED: dict[str, Operation] = {"swap_tensors": exchanged}


class Halved(torch.nn.Module):
    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return t / 2


def parametrized(s: Side) -> Any:
    linear: Any = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = as_parameter(s.w)
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Halved())
    return linear.weight.sum()


def normed(s: Side) -> Any:
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = torch.nn.Parameter(s.w.detach())
    return torch.nn.utils.parametrizations.weight_norm(linear)(s.y)


def old_normed(s: Side) -> Any:
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = torch.nn.Parameter(s.w.data)
    return torch.nn.utils.weight_norm(linear)(s.y)


# After these operations, the engine may keep the tensor resident for two reasons: (1) a reader has the
# tensor's address, or (2) the tensor's storage can no longer be emptied.
STORAGES: dict[str, Operation] = {
    "numpy": lambda s: s.w.detach().numpy().copy(),
    "numpy, forced": lambda s: s.w.numpy(force=True).sum(),
    "array": lambda s: numpy.asarray(s.w.detach()).sum(),
    "array of itself": lambda s: numpy.array(s.w),
    "numpy adds": lambda s: numpy.add(s.w.detach(), 1),
    "numpy mixes": lambda s: s.x.numpy() * s.w.detach(),
    "dlpack": lambda s: torch.from_dlpack(s.w.detach()).sum(),
    "dlpack of itself": lambda s: numpy.from_dlpack(s.w.detach()).sum(),
    "to_dlpack": lambda s: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(s.w.detach())),
    "to_dlpack of itself": lambda s: torch.from_dlpack(torch.utils.dlpack.to_dlpack(s.w)).sum(),
    "data_ptr": lambda s: s.w.data_ptr() != 0,
    "by pointer": by_pointer,
    "untyped_storage": lambda s: s.w.untyped_storage().nbytes(),
    "untyped_storage, read": lambda s: bytes(s.w.untyped_storage()[:16].tolist()),
    "untyped_storage, cloned": lambda s: s.w.untyped_storage().clone().tolist(),
    "storage": lambda s: s.w.storage()[3],
    "pickle of the storage": lambda s: pickle.loads(pickle.dumps(s.w.storage())).tolist(),
    "is_shared": lambda s: s.w.is_shared(),
    "assigned": assigned,
    "assigned to another": assigned_to_another,
    "two names": two_names,
    "set_": lambda s: s.w.detach().set_(s.x.untyped_storage(), 0, (4,), (1,)),
    "set_ of it": lambda s: torch.empty(0).set_(s.w.detach()),  # type: ignore[call-overload]
    "set_ of the storage": lambda s: torch.empty(0).set_(s.w.untyped_storage()),
    "parametrize": parametrized,
    "weight_norm": normed,
    "weight_norm, the old one": old_normed,
    "share_memory_": lambda s: s.w.share_memory_().is_shared(),
    "resize_": lambda s: s.w.detach().resize_(4, 4),
}

FLOATS: dict[str, Operation] = {
    **ARITHMETIC,
    **VIEWS,
    **READS,
    **WRITES,
    **COPIES,
    **AUTOGRAD,
    **STORAGES,
    **REFUSED,
}


def ones_at(s: Side, index: torch.Tensor) -> Any:
    s.x[index] = 1.0
    return s.x


# In these operations, `w` is an integer tensor and `v` is a boolean tensor.
INDICES: dict[str, Operation] = {
    "indexes what is here": lambda s: s.x[s.w],
    "indexes what is here, with others": lambda s: s.x[0, s.w],
    "masks what is here": lambda s: s.x[s.v],
    "sets by index": lambda s: ones_at(s, s.w[:4]),
    "sets by itself": lambda s: ones_at(s, s.w),
    "sets by mask": lambda s: ones_at(s, s.v),
    "take": lambda s: torch.take(s.x, s.w),
    "gathers": lambda s: s.x.gather(1, s.w),
    "embedding of": lambda s: F.embedding(s.w, s.x),
    "scatter_": lambda s: s.x.scatter_(1, s.w, 2.0),
    "where": lambda s: torch.where(s.v, s.x, 0),
    "masked_select": lambda s: s.x.masked_select(s.v),
    "numbers of": lambda s: s.w.float().mean().item(),
    "count": lambda s: s.v.sum().item(),
    "a list by item": lambda s: list(range(ROWS))[s.w[1, 1]],
    "range": lambda s: list(range(s.w[3, 3])),
}
