"""Weights that eager autograd saved for its backward.

The engine may evict such a weight until the backward reads it, even if other objects also hold the weight.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from eager_beside import (
    WIDTH,
    Use,
    bare,
    evict_all,
    gradients,
    inputs,
    layer,
    record,
    same,
    three_layers,
    trained_beside,
)
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import teraio
from teraio.runtime.ledger.record import State

KEPT: list[Any] = []


class Doubled(torch.autograd.Function):
    """A user's autograd function whose backward reads its saved tensors in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t() * 2, x.t() @ gradients[0] * 2


def keeps_a_view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x by a view of the weight, and keep a reference to the view."""
    view = weight.t()
    KEPT.append(view)
    return x @ view


MAY_LEAVE: dict[str, Use] = {
    "linear": lambda m, x: F.linear(x, layer(m, 0).weight, layer(m, 0).bias),
    "three dimensions": lambda m, x: F.linear(x[None], layer(m, 0).weight, layer(m, 0).bias),
    "product": lambda m, x: x @ layer(m, 0).weight,
    "twice": lambda m, x: F.linear(F.linear(x, layer(m, 0).weight), layer(m, 0).weight),
    "elementwise": lambda m, x: x[:1] * layer(m, 0).weight,
    "penalty": lambda m, x: x.sum() * layer(m, 0).weight.square().sum(),
    "a function of the user's": lambda m, x: Doubled.apply(x, layer(m, 0).weight),
    "rows": lambda m, x: F.embedding(torch.tensor([3, 5]), layer(m, 0).weight) * x[:2],
    "a view": lambda m, x: x @ layer(m, 0).weight.t(),
    "a view that is kept": lambda m, x: keeps_a_view(x, layer(m, 0).weight),
}


@pytest.fixture
def model(nothing_left: None) -> Iterator[nn.Module]:
    yield trained_beside()
    KEPT.clear()


@pytest.mark.parametrize("name", MAY_LEAVE)
def test_backward_fetches_saved_weight(model: nn.Module, name: str) -> None:
    wanted = gradients(MAY_LEAVE[name], bare(model), evicted=False)
    assert same(gradients(MAY_LEAVE[name], model, evicted=True), wanted)
    assert record(layer(model, 0).weight).pins == 0
    evict_all()
    assert record(layer(model, 0).weight).state is State.EVICTED, "it is not evictable again"


def test_unpack_hook_of_the_user_runs_only_when_the_backward_reads(model: nn.Module) -> None:
    linear = layer(model, 0)
    unpacked: list[torch.Tensor] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        unpacked.append(saved)
        return saved

    x = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        made = F.linear(x, linear.weight)
    assert not unpacked
    evict_all()
    assert record(linear.weight).state is State.EVICTED
    made.sum().backward()
    assert unpacked
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, WIDTH) @ layer(bare(model), 0).weight)


def test_saved_tensor_read_from_a_node_has_the_bytes(model: nn.Module) -> None:
    made = F.linear(inputs(), layer(model, 0).weight)
    evict_all()
    saved = made.grad_fn._saved_mat2  # type: ignore[union-attr]
    assert record(layer(model, 0).weight).state is State.EVICTED, "the access has fetched the weight"
    assert torch.equal(saved, layer(bare(model), 0).weight.t())
    evict_all()
    assert record(layer(model, 0).weight).state is State.EVICTED, "the held view keeps the weight resident"
    assert torch.equal(saved, layer(bare(model), 0).weight.t())


def test_node_called_by_hand_reads_saved_weight(model: nn.Module) -> None:
    def use(model: nn.Module, evicted: bool) -> torch.Tensor:
        made = F.linear(inputs(), layer(model, 0).weight)
        if evicted:
            evict_all()
        node: Any = made.grad_fn
        found: torch.Tensor = node(torch.ones(4, WIDTH))[0]
        return found

    wanted = use(bare(model), False)
    assert torch.equal(use(model, True), wanted)


def test_saved_view_that_is_written_raises_as_in_torch(model: nn.Module) -> None:
    made = inputs() @ layer(model, 0).weight
    for node in (made, F.linear(inputs(), layer(model, 0).weight)):
        with torch.no_grad():
            layer(model, 0).weight.mul_(2)
        evict_all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            node.sum().backward()
    assert record(layer(model, 0).weight).pins == 0


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_only_operators_of_the_user(model: nn.Module) -> None:
    def seen(model: nn.Module, evicted: bool) -> list[str]:
        x = inputs()
        with Seen() as mode:
            made = F.linear(x, layer(model, 0).weight).square().sum()
            if evicted:
                evict_all()
            made.backward()
        return mode.functions

    assert seen(model, True) == seen(bare(model), False)


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(4, WIDTH))])
def test_scripted_and_traced_modules_read_evicted_weights(
    model: nn.Module, make: Callable[[nn.Module], Any]
) -> None:
    read = make(layer(model, 0))
    evict_all()
    assert record(layer(model, 0).weight).state is State.EVICTED
    x, other = inputs(), inputs()
    made, wanted = read(x), layer(bare(model), 0)(other)
    assert torch.equal(made, wanted)
    evict_all()
    for result in (made, wanted):
        result.square().sum().backward()
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)


def test_weight_is_evictable_after_copy_log_and_pickle(model: nn.Module) -> None:
    copies = {name: value.clone() for name, value in model.state_dict().items()}
    norms = [parameter.norm().item() for parameter in model.parameters()]
    pickled = pickle.dumps(model)
    for _ in range(2):
        evict_all()
        assert all(record(layer(model, n).weight).state is State.EVICTED for n in range(3))
        again = pickle.loads(pickled)
        assert all(torch.equal(copies[name], value) for name, value in model.state_dict().items())
        assert all(torch.equal(copies[name], value) for name, value in again.state_dict().items())
        pickled = pickle.dumps(model)
    assert norms == [parameter.norm().item() for parameter in bare(model).parameters()]


def test_backward_compiled_by_another_backend_reads_evicted_saved_tensors(nothing_left: None) -> None:
    def use(model: nn.Module, evicted: bool) -> list[torch.Tensor]:
        options: Any = {"inner": "eager", "memory": "64MiB"} if evicted else None
        backend = "teraio" if evicted else "aot_eager"
        compiled: Any = torch.compile(model, backend=backend, options=options)
        x = torch.ones(1024, WIDTH, requires_grad=True)
        for step in range(3):
            loss = compiled(x).tanh().sum()
            if evicted:
                evict_all()
            other: Any = torch.compile(backend="eager")
            with torch._dynamo.compiled_autograd._enable(other) if step else contextlib.nullcontext():
                loss.backward()
        teraio.reset()
        torch._dynamo.reset()
        return [p.grad for p in (x, *model.parameters()) if p.grad is not None]

    model = nn.Sequential(three_layers(), nn.Tanh(), three_layers())
    copy = deepcopy(model)
    assert same(use(model, True), use(copy, False))


def test_checkpoint_recomputation_reads_evicted_weights(model: nn.Module) -> None:
    def use(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(MAY_LEAVE["linear"], model, x, use_reentrant=False)
        return made

    assert same(gradients(use, model, evicted=True), gradients(use, bare(model), evicted=False))


def test_retained_graph_fetches_saved_weight_in_each_backward(model: nn.Module) -> None:
    linear = layer(model, 0)
    x = inputs()
    loss = F.linear(x, linear.weight).square().sum()
    found: list[torch.Tensor] = []
    for _ in range(2):
        evict_all()
        assert record(linear.weight).state is State.EVICTED
        found += torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(*found)
    assert record(linear.weight).pins == 0


def test_double_backward_reads_evicted_weights(model: nn.Module) -> None:
    def twice(model: nn.Module, evicted: bool) -> torch.Tensor:
        x = inputs()
        loss = F.linear(x, layer(model, 0).weight).pow(3).sum()
        if evicted:
            evict_all()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        if evicted:
            evict_all()
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(twice(model, True), twice(bare(model), False))


def test_weight_of_a_failed_backward_is_evictable_after_its_graph_is_freed(model: nn.Module) -> None:
    linear = layer(model, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x = inputs()
        made = F.linear(x, linear.weight)
        with torch.no_grad():
            linear.weight.mul_(1)
        made.sum().backward()
    del made, x
    gc.collect()
    assert record(linear.weight).pins == 0
    evict_all()
    assert record(linear.weight).state is State.EVICTED


def test_backward_reads_new_bytes_after_data_is_assigned(model: nn.Module) -> None:
    """Assign other data to a weight that a backward will read.

    In torch without teraio, too, a backward reads the bytes that the saved weight has when the backward runs.
    """

    def use(model: nn.Module, evicted: bool) -> torch.Tensor:
        weight = layer(model, 0).weight
        x = inputs()
        made = x[:1] * weight
        weight.data = torch.full((WIDTH, WIDTH), 3.0)
        if evicted:
            evict_all()
        made.square().sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = use(bare(model), False)
    assert torch.equal(use(model, True), wanted)


def test_backward_after_reset_reads_the_saved_weights(model: nn.Module) -> None:
    wanted = gradients(MAY_LEAVE["linear"], bare(model), evicted=False)
    x = inputs()
    made = MAY_LEAVE["linear"](model, x)
    evict_all()
    teraio.reset()
    made.square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, wanted[0])
