"""Weights that eager code alone uses, beside those of programs: within the budget as well, with their
gradients."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from torch.autograd import forward_ad
from torch.nn import functional as F

import teraio
from teraio.runtime.ledger.record import State


def test_weights_that_eager_code_alone_uses_are_managed_beside_those_of_programs(nothing_left: None) -> None:
    def linear(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer(model, 2).weight)

    model = trained_beside()
    found = record(layer(model, 2).weight)
    assert found.evictable and found.kind == "weight"
    assert re.fullmatch(r"optimizer \d+\.0\.4", found.name), found.name
    wanted = gradients(linear, bare(model), away=False)
    assert same(gradients(linear, model, away=True), wanted)
    send_away()
    assert found.state is State.AWAY
    assert torch.equal(layer(model, 2).weight, layer(bare(model), 2).weight)


@pytest.mark.parametrize(("memory", "leaves"), [("64MiB", False), ("8.6MiB", True)])
def test_an_embedding_with_sparse_gradients_trains_beside_them(
    nothing_left: None, memory: str, leaves: bool
) -> None:
    """Its gradients have no storage of their own."""

    def losses(memory: str | None) -> list[float]:
        torch.manual_seed(0)
        rows = nn.Embedding(2000, WIDTH, sparse=True)
        layers: Any = three_layers()
        trained = [*rows.parameters(), *layers.parameters()]
        if memory:
            layers = torch.compile(layers, backend="teraio", options={"inner": "eager", "memory": memory})
        optimizer = torch.optim.SGD(trained, lr=0.1)
        found = []
        for step in range(5):
            loss = layers(rows(torch.arange(1024) + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(memory) == losses(None)
    assert not leaves or teraio.stats()["evictions"] > 4


def all_leave(_: torch.Tensor) -> None:
    send_away()


def trained(head: Callable[[], nn.Module], use: Use, away: bool) -> list[torch.Tensor]:
    """Losses and weights of a training whose head is in no program. Whatever may leave does, whenever a
    weight of the head gets a gradient."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), head())
    options: Any = {"inner": "eager", "memory": "64MiB"} if away else None
    front: Any = torch.compile(model[0], backend="teraio" if away else "aot_eager", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(4):
        if away and step == 2:
            for weight in model[1].parameters():
                weight.register_post_accumulate_grad_hook(all_leave)
        loss = use(model[1], front(inputs().detach()[None])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert not away or teraio.stats()["evictions"] >= 4
    teraio.reset()
    return [*found, *(weight.detach().clone() for weight in model.parameters())]


class Places(nn.Module):
    """The gradient of the places is a view of the one that goes on to the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.after(self.before(x) + self.places[None])
        return made


class Joined(nn.Module):
    """Gradients of both are views of one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch.cat([self.one, torch.tanh(self.other)]))


class Looking(nn.Linear):
    """A hook of the user's keeps the gradient, and gives a view of it on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.norms: list[torch.Tensor] = []
        self.weight.register_hook(self.look)

    def look(self, gradient: torch.Tensor) -> torch.Tensor:
        self.norms.append(gradient)
        return gradient.view(-1).view(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x) * sum((n.norm() for n in self.norms), torch.ones(()))
        self.norms.clear()
        return made


@pytest.mark.parametrize("head", [Places, Joined, Looking])
def test_a_gradient_that_others_have_as_well_may_leave_and_is_the_same_for_all(
    nothing_left: None, head: Any
) -> None:
    def use(head: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = head(x)
        return made

    assert same(trained(head, use, True), trained(head, use, False))


def in_a_thread(weight: torch.Tensor) -> Any:
    def reads() -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: weight.detach().cos()).result()

    return reads


HELD: dict[str, Callable[[torch.Tensor], Callable[[], torch.Tensor]]] = {
    "data": lambda w: partial(torch.cos, w.data),
    "detached": lambda w: partial(torch.cos, w.detach()),
    "a view": lambda w: partial(torch.cos, w.detach()[3:9].t()),
    "a parameter of the same bytes": lambda w: partial(torch.cos, nn.Parameter(w.data)),
    "the same storage": lambda w: partial(torch.cos, torch.empty(0).set_(w.untyped_storage())),
    "a thread": in_a_thread,
    "a function of functions": lambda w: partial(torch.func.vmap(torch.cos), w.detach()),
}


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_whoever_holds_a_weight_it_may_leave_and_he_reads_the_bytes_of_now(
    nothing_left: None, hold: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
) -> None:
    model = trained_beside()
    weight = layer(model, 0).weight
    reads, other = hold(weight), hold(layer(bare(model), 0).weight)
    for _ in range(2):
        send_away()
        assert record(weight).state is State.AWAY
        assert torch.equal(reads(), other())
    with torch.no_grad():
        weight.add_(1)
    written = hold(weight.clone())()
    send_away()
    assert record(weight).state is State.AWAY
    assert torch.equal(reads(), written)


def no_transform() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@pytest.mark.parametrize("block", [no_transform, torch.inference_mode, forward_ad.dual_level])
def test_what_is_detached_in_any_mode_has_the_bytes(nothing_left: None, block: Callable[[], Any]) -> None:
    model = trained_beside()
    wanted = layer(bare(model), 0).weight
    send_away()
    with block():
        found = layer(model, 0).weight.detach()
        assert torch.equal(found + 0, wanted)
    assert torch.equal(layer(model, 0).weight, wanted)


def test_what_is_detached_under_vmap_has_the_bytes(nothing_left: None) -> None:
    model = trained_beside()
    wanted = layer(bare(model), 0).weight
    send_away()
    found = torch.func.vmap(lambda row: layer(model, 0).weight.detach() @ row)(torch.eye(WIDTH))
    assert torch.equal(found.T, wanted)
