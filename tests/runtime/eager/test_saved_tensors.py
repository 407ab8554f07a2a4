"""What eager autograd saved of a weight may be away until it is read, whoever else holds the weight."""

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
    gradients,
    inputs,
    layer,
    record,
    same,
    send_away,
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
    """A function of the user's. What it kept it reads in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t() * 2, x.t() @ gradients[0] * 2


def keeps_a_view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Remembers what it saved."""
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
def test_a_node_brings_back_what_it_saved(model: nn.Module, name: str) -> None:
    wanted = gradients(MAY_LEAVE[name], bare(model), away=False)
    assert same(gradients(MAY_LEAVE[name], model, away=True), wanted)
    assert record(layer(model, 0).weight).pins == 0
    send_away()
    assert record(layer(model, 0).weight).state is State.AWAY, "it may leave again"


def test_a_hook_of_the_users_gets_what_is_saved_when_it_is_read_and_not_before(model: nn.Module) -> None:
    linear = layer(model, 0)
    unpacked: list[torch.Tensor] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        unpacked.append(saved)
        return saved

    x = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        made = F.linear(x, linear.weight)
    assert not unpacked
    send_away()
    assert record(linear.weight).state is State.AWAY
    made.sum().backward()
    assert unpacked
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, WIDTH) @ layer(bare(model), 0).weight)


def test_who_else_asks_a_node_for_what_it_saved_gets_it(model: nn.Module) -> None:
    made = F.linear(inputs(), layer(model, 0).weight)
    send_away()
    saved = made.grad_fn._saved_mat2  # type: ignore[union-attr]
    assert record(layer(model, 0).weight).state is State.AWAY, "asking reads nothing"
    assert torch.equal(saved, layer(bare(model), 0).weight.t())
    send_away()
    assert record(layer(model, 0).weight).state is State.AWAY, "that he has it keeps nothing here"
    assert torch.equal(saved, layer(bare(model), 0).weight.t())


def test_a_node_that_is_called_by_hand_reads_them(model: nn.Module) -> None:
    def use(model: nn.Module, away: bool) -> torch.Tensor:
        made = F.linear(inputs(), layer(model, 0).weight)
        if away:
            send_away()
        node: Any = made.grad_fn
        found: torch.Tensor = node(torch.ones(4, WIDTH))[0]
        return found

    wanted = use(bare(model), False)
    assert torch.equal(use(model, True), wanted)


def test_a_view_that_was_saved_and_then_written_is_refused_as_torch_does(model: nn.Module) -> None:
    made = inputs() @ layer(model, 0).weight
    for node in (made, F.linear(inputs(), layer(model, 0).weight)):
        with torch.no_grad():
            layer(model, 0).weight.mul_(2)
        send_away()
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


def test_modes_see_what_the_user_does_and_no_more(model: nn.Module) -> None:
    def seen(model: nn.Module, away: bool) -> list[str]:
        x = inputs()
        with Seen() as mode:
            made = F.linear(x, layer(model, 0).weight).square().sum()
            if away:
                send_away()
            made.backward()
        return mode.functions

    assert seen(model, True) == seen(bare(model), False)


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(4, WIDTH))])
def test_scripts_and_traces_read_them(model: nn.Module, make: Callable[[nn.Module], Any]) -> None:
    read = make(layer(model, 0))
    send_away()
    assert record(layer(model, 0).weight).state is State.AWAY
    x, other = inputs(), inputs()
    made, wanted = read(x), layer(bare(model), 0)(other)
    assert torch.equal(made, wanted)
    send_away()
    for result in (made, wanted):
        result.square().sum().backward()
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)


def test_what_is_copied_logged_or_pickled_may_leave(model: nn.Module) -> None:
    copies = {name: value.clone() for name, value in model.state_dict().items()}
    norms = [parameter.norm().item() for parameter in model.parameters()]
    pickled = pickle.dumps(model)
    for _ in range(2):
        send_away()
        assert all(record(layer(model, n).weight).state is State.AWAY for n in range(3))
        again = pickle.loads(pickled)
        assert all(torch.equal(copies[name], value) for name, value in model.state_dict().items())
        assert all(torch.equal(copies[name], value) for name, value in again.state_dict().items())
        pickled = pickle.dumps(model)
    assert norms == [parameter.norm().item() for parameter in bare(model).parameters()]


def test_a_backward_that_another_backend_compiles_finds_what_forwards_saved(nothing_left: None) -> None:
    def use(model: nn.Module, away: bool) -> list[torch.Tensor]:
        options: Any = {"inner": "eager", "memory": "64MiB"} if away else None
        backend = "teraio" if away else "aot_eager"
        compiled: Any = torch.compile(model, backend=backend, options=options)
        x = torch.ones(1024, WIDTH, requires_grad=True)
        for step in range(3):
            loss = compiled(x).tanh().sum()
            if away:
                send_away()
            other: Any = torch.compile(backend="eager")
            with torch._dynamo.compiled_autograd._enable(other) if step else contextlib.nullcontext():
                loss.backward()
        teraio.reset()
        torch._dynamo.reset()
        return [p.grad for p in (x, *model.parameters()) if p.grad is not None]

    model = nn.Sequential(three_layers(), nn.Tanh(), three_layers())
    copy = deepcopy(model)
    assert same(use(model, True), use(copy, False))


def test_recomputation_uses_them_again(model: nn.Module) -> None:
    def use(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(MAY_LEAVE["linear"], model, x, use_reentrant=False)
        return made

    assert same(gradients(use, model, away=True), gradients(use, bare(model), away=False))


def test_a_graph_that_is_kept_brings_them_back_each_time(model: nn.Module) -> None:
    linear = layer(model, 0)
    x = inputs()
    loss = F.linear(x, linear.weight).square().sum()
    found: list[torch.Tensor] = []
    for _ in range(2):
        send_away()
        assert record(linear.weight).state is State.AWAY
        found += torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(*found)
    assert record(linear.weight).pins == 0


def test_a_backward_of_a_backward_has_what_it_needs(model: nn.Module) -> None:
    def twice(model: nn.Module, away: bool) -> torch.Tensor:
        x = inputs()
        loss = F.linear(x, layer(model, 0).weight).pow(3).sum()
        if away:
            send_away()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        if away:
            send_away()
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert torch.equal(twice(model, True), twice(bare(model), False))


def test_a_node_that_fails_lets_go_with_its_graph(model: nn.Module) -> None:
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
    send_away()
    assert record(linear.weight).state is State.AWAY


def test_other_bytes_that_a_weight_was_given_are_the_ones_that_come(model: nn.Module) -> None:
    """As torch has it: a node that saved the weight reads what is in it then."""

    def use(model: nn.Module, away: bool) -> torch.Tensor:
        weight = layer(model, 0).weight
        x = inputs()
        made = x[:1] * weight
        weight.data = torch.full((WIDTH, WIDTH), 3.0)
        if away:
            send_away()
        made.square().sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = use(bare(model), False)
    assert torch.equal(use(model, True), wanted)


def test_after_the_end_of_the_engine_a_graph_goes_on(model: nn.Module) -> None:
    wanted = gradients(MAY_LEAVE["linear"], bare(model), away=False)
    x = inputs()
    made = MAY_LEAVE["linear"](model, x)
    send_away()
    teraio.reset()
    made.square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, wanted[0])
