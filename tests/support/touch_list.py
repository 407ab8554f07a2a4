"""Operations of user code on a tensor. Each operation is a function of a `Side`.

Each operation runs two times: on an evicted tensor, and on a plain tensor with the same bytes. Both runs must
give the same results, and leave the same bytes in the tensors.
"""

from __future__ import annotations

import copy
import io
import operator
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

ROWS, COLUMNS = 64, 64  # at this shape, a boolean tensor is just large enough to be evicted


class Side:
    """The tensors that an operation uses. `w` and `v` are of the tested kind, such as weights or gradients.
    `x` and `y` are never evicted.
    """

    def __init__(self, w: torch.Tensor, v: torch.Tensor, layer: Any, other: Any) -> None:
        self.w, self.v, self.layer, self.other = w, v, layer, other
        numbers = torch.Generator().manual_seed(11)
        self.x = torch.randn(ROWS, COLUMNS, generator=numbers)
        self.y = torch.randn(5, COLUMNS, generator=numbers, requires_grad=True)


Operation = Callable[[Side], Any]


def stream_of(thing: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(thing, stream)
    stream.seek(0)
    return stream


def saved(thing: Any) -> Any:
    return torch.load(stream_of(thing), weights_only=False)


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@torch.jit.script
def scripted(t: torch.Tensor) -> torch.Tensor:
    return t * 2 + 1


def quietly(work: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return work()


def put(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target


def under(mode: Any, work: Callable[[], Any]) -> Any:
    with mode:
        return work()


ARITHMETIC: dict[str, Operation] = {
    "add": lambda s: s.w + 1,
    "add, from the right": lambda s: s.x + s.w,
    "matmul": lambda s: s.y @ s.w.t(),
    "mixed with another": lambda s: s.w * s.v - s.x,
    "pow": lambda s: s.w.abs() ** 0.5,
    "neg": lambda s: -s.w,
    "method of the class": lambda s: torch.Tensor.mul(s.w, 3),
    "einsum": lambda s: torch.einsum("ij,kj->ik", s.w, s.x),
    "cat": lambda s: torch.cat([s.x, s.w, s.v]),
    "stack": lambda s: torch.stack((s.w, s.x)),
    "where": lambda s: torch.where(s.x > 0, s.w, s.v),
    "softmax": lambda s: F.softmax(s.w, 1),
    "aten": lambda s: torch.ops.aten.add.Tensor(s.w, s.x),
    "_VariableFunctions": lambda s: torch._C._VariableFunctions.add(s.w, 1),
    "linalg": lambda s: torch.linalg.vector_norm(s.w),
    "sort": lambda s: s.w.sort(1),
    "topk": lambda s: s.w.flatten().topk(4),
    "default device": lambda s: under(torch.device("cpu"), lambda: s.w + 1),
    "autocast": lambda s: under(torch.autocast("cpu", torch.bfloat16), lambda: F.linear(s.x, s.w)),
    "in a thread": lambda s: in_thread(lambda: s.w * 2),
    "to_sparse": lambda s: s.w.to_sparse(),
    "quantize": lambda s: torch.quantize_per_tensor(s.w.detach(), 0.1, 0, torch.qint8).int_repr(),
    "script": lambda s: scripted(s.w),
    "trace": lambda s: torch.jit.trace(lambda t: t * 2, (s.x,))(s.w),
}

VIEWS: dict[str, Operation] = {
    "view": lambda s: s.w.view(-1)[3],
    "reshape": lambda s: s.w.reshape(COLUMNS, ROWS) + 1,
    "transpose": lambda s: s.w.t().contiguous(),
    "expand": lambda s: s.w[:1].expand(4, -1),
    "narrow": lambda s: s.w.narrow(0, 2, 3),
    "as_strided": lambda s: s.w.as_strided((4, 4), (8, 1), 2),
    "unfold": lambda s: s.w.unfold(1, 4, 4),
    "chunk": lambda s: s.w.chunk(3),
    "unbind": lambda s: s.w.unbind(),
    "view of another type": lambda s: s.w.detach().view(torch.int32),
    "diagonal": lambda s: s.w.diagonal(),
    "detach": lambda s: s.w.detach() + 1,
    "detach, then kept": lambda s: s.w.detach(),
    "data": lambda s: s.w.data * 2,
    "data, then kept": lambda s: s.w.data,
    "view, then kept": lambda s: s.w.view(-1),
    "iterate": lambda s: [row.sum() for row in s.w],
    "index": lambda s: s.w[1:7, None, ::3],
    "index by a mask": lambda s: s.w[s.x > 0],
    "index by numbers": lambda s: s.w[torch.tensor([3, 1])],
    "gather": lambda s: s.w.gather(1, torch.zeros(ROWS, 2, dtype=torch.int64)),
    "split sizes": lambda s: torch.split(s.w, [1, ROWS - 1])[1].mean(),
    "T": lambda s: s.w.T.sum(0),
    "a view written": lambda s: quietly(lambda: s.w[2:5].mul_(3)),
}

READS: dict[str, Operation] = {
    "print": lambda s: f"{s.w}",
    "repr": lambda s: repr(s.w),
    "tolist": lambda s: s.w.tolist(),
    "item": lambda s: s.w[0, 0].item(),
    "float": lambda s: float(s.w.sum()),
    "format": lambda s: f"{s.w.sum():.3f}",
    "bool": lambda s: bool((s.w == s.w).all()),
    "len and shape": lambda s: (len(s.w), s.w.shape, s.w.dtype, s.w.is_leaf),
    "compare": lambda s: (s.w > s.x, s.w == s.v),
    "equal": lambda s: torch.equal(s.w, s.w.clone()),
    "allclose": lambda s: torch.allclose(s.w, s.v),
    "assert_close": lambda s: torch.testing.assert_close(s.w, s.w.clone()),
    "max of a dimension": lambda s: s.w.max(dim=1),
    "isfinite": lambda s: s.w.isfinite().all().item(),
    "any in a list": lambda s: any(s.w is t for t in [s.x, s.w]),
    "norm": lambda s: s.w.norm(2),
    "histc": lambda s: torch.histc(s.w.detach(), 4),
    "multinomial": lambda s: torch.multinomial(s.w.abs(), 1).shape,
}

WRITES: dict[str, Operation] = {
    "add_": lambda s: quietly(lambda: s.w.add_(1)),
    "iadd": lambda s: quietly(lambda: operator.iadd(s.w, s.x)),
    "zero_": lambda s: s.w.detach().zero_(),
    "fill a row": lambda s: quietly(lambda: put(s.w, 3, 7.0)),
    "set by a mask": lambda s: quietly(lambda: put(s.w, s.x > 0, s.v[s.x > 0])),
    "set what is here from it": lambda s: put(s.x, slice(4), s.w.detach()[:4]),
    "out": lambda s: quietly(lambda: torch.add(s.x, 1, out=s.w)),
    "out, of it": lambda s: quietly(lambda: torch.mul(s.w, s.v, out=torch.empty_like(s.x))),
    "copy_ from": lambda s: s.x.copy_(s.w.detach()),
    "copy_ to": lambda s: quietly(lambda: s.w.copy_(s.x)),
    "copy_ between": lambda s: quietly(lambda: s.w.copy_(s.v)),
    "data written": lambda s: s.w.data.mul_(0.5),
    "lerp_": lambda s: quietly(lambda: s.x.lerp_(s.w, 0.1)),
    "average in it": lambda s: quietly(lambda: s.w.lerp_(s.v, 0.1)),
    "addcmul_": lambda s: quietly(lambda: s.w.addcmul_(s.v, s.x)),
    "init": lambda s: torch.nn.init.constant_(s.w, 0.25),
    "normal_": lambda s: s.w.data.normal_(generator=torch.Generator().manual_seed(1)),
    "inference mode": lambda s: under(torch.inference_mode(), lambda: (s.w + s.x).sum().item()),
    "inference mode, written": lambda s: under(torch.inference_mode(), lambda: s.w.mul_(2).sum().item()),
    "index_add_": lambda s: quietly(lambda: s.w.index_add_(0, torch.tensor([1]), s.x[:1])),
    "apply_": lambda s: s.w.data.apply_(lambda number: number + 1),
    "masked_fill_": lambda s: s.w.data.masked_fill_(s.x > 0, 0),
    "foreach add": lambda s: quietly(lambda: torch._foreach_add_([s.w, s.x, s.v], 2)),
    "foreach mixed": lambda s: torch._foreach_mul([s.x, s.w, s.v], [s.w, s.x, s.x]),
    "foreach norm": lambda s: torch._foreach_norm([s.w.detach(), s.x, s.v]),
    "foreach copy": lambda s: quietly(lambda: torch._foreach_copy_([s.x, s.w], [s.v, s.x])),
    "foreach lerp": lambda s: quietly(lambda: torch._foreach_lerp_([s.w, s.x], [s.x, s.v], 0.3)),
}

COPIES: dict[str, Operation] = {
    "clone": lambda s: s.w.clone(),
    "to": lambda s: s.w.to(torch.float64),
    "half": lambda s: s.w.half(),
    "cpu": lambda s: s.w.cpu().sum(),
    "to a copy": lambda s: s.w.to("cpu", copy=True),
    "contiguous": lambda s: s.w.contiguous().sum(),
    "deepcopy": lambda s: copy.deepcopy(s.w),
    "copy": lambda s: copy.copy(s.w),
    "pickle": lambda s: pickle.loads(pickle.dumps(s.w)),
    "save": lambda s: saved(s.w),
    "save a list": lambda s: saved([s.w, s.v, s.x, s.w]),
    "save, the old format": lambda s: torch.load(legacy(s.w), weights_only=False),
    "as_tensor": lambda s: torch.as_tensor(s.w).sum(),
    "tensor of it": lambda s: torch.tensor(s.w),
    "tensor of numbers": lambda s: torch.tensor([s.w[0, 0], s.w[1, 1]]),
    "tensor of tensors": lambda s: torch.tensor([s.w, s.v][0].detach()),
    "tensor of rows": lambda s: torch.tensor([list(s.w.detach()[0]), list(s.v.detach()[0])]),
    "new_tensor": lambda s: s.x.new_tensor(s.w.detach()),
    "full_like": lambda s: torch.full_like(s.w, 2),
    "new_zeros": lambda s: s.w.new_zeros(3),
    "Parameter of it": lambda s: torch.nn.Parameter(s.w.detach(), requires_grad=False),
    "Parameter of data": lambda s: torch.nn.Parameter(s.w.data, requires_grad=False),
    "Parameter of itself": lambda s: torch.nn.Parameter(s.w, requires_grad=False),
    "Buffer of it": lambda s: torch.nn.Buffer(s.w.detach()).sum(),
    "Tensor of it": lambda s: torch.Tensor(s.w.detach()),
    "Tensor of itself": lambda s: torch.Tensor(s.w).sum(),
    "new_tensor of itself": lambda s: s.x.new_tensor(s.w),
    "meta": lambda s: s.w.to("meta").shape,
    "module to": lambda s: copy.deepcopy(s.layer).double().state_dict(),
    "module deepcopy": lambda s: list(copy.deepcopy(s.layer).state_dict().values()),
}


def legacy(thing: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(thing, stream, _use_new_zipfile_serialization=False)
    stream.seek(0)
    return stream
