"""Weights that only eager code uses, in models whose other weights are used by compiled programs.

The gradients of these weights count in the budget, too.
"""

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
from torch.autograd import forward_ad
from torch.nn import functional as F

import teraio
from teraio.runtime.ledger.record import State


def test_weight_that_only_eager_code_uses_is_evictable(nothing_left: None) -> None:
    def linear(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer(model, 2).weight)

    model = trained_beside()
    found = record(layer(model, 2).weight)
    assert found.evictable and found.kind == "weight"
    assert re.fullmatch(r"optimizer \d+\.0\.4", found.name), found.name
    wanted = gradients(linear, bare(model), evicted=False)
    assert same(gradients(linear, model, evicted=True), wanted)
    evict_all()
    assert found.state is State.EVICTED
    assert torch.equal(layer(model, 2).weight, layer(bare(model), 2).weight)


@pytest.mark.parametrize(("memory", "evicts"), [("64MiB", False), ("8.6MiB", True)])
def test_embedding_with_sparse_gradients_trains_as_without_teraio(
    nothing_left: None, memory: str, evicts: bool
) -> None:
    """Train an embedding with a sparse gradient, whose indices and values are separate tensors."""

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
    assert not evicts or teraio.stats()["evictions"] > 4


def evict_all_after_gradient(_: torch.Tensor) -> None:
    evict_all()


def trained(head: Callable[[], nn.Module], use: Use, evicted: bool) -> list[torch.Tensor]:
    """Train a model whose head is in no program. Return the losses and the weights.

    If `evicted`, hooks evict all evictable tensors whenever a weight of the head gets a gradient.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), head())
    options: Any = {"inner": "eager", "memory": "64MiB"} if evicted else None
    front: Any = torch.compile(model[0], backend="teraio" if evicted else "aot_eager", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(4):
        if evicted and step == 2:
            for weight in model[1].parameters():
                weight.register_post_accumulate_grad_hook(evict_all_after_gradient)
        loss = use(model[1], front(inputs().detach()[None])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert not evicted or teraio.stats()["evictions"] >= 4
    teraio.reset()
    return [*found, *(weight.detach().clone() for weight in model.parameters())]


class Places(nn.Module):
    """A module with a weight `places` and a layer `before`.

    Autograd computes one tensor, which is the gradient of the layer's output. The gradient of `places` is a
    view of this tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.after(self.before(x) + self.places[None])
        return made


class Joined(nn.Module):
    """A module with two weights. The gradients of both weights are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch.cat([self.one, torch.tanh(self.other)]))


class Looking(nn.Linear):
    """A layer with a user's hook. The hook keeps the gradient and returns a view of the gradient."""

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
def test_gradient_with_several_holders_is_the_same_for_all_after_eviction(
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
def test_holder_of_an_evicted_weight_reads_its_current_bytes(
    nothing_left: None, hold: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
) -> None:
    model = trained_beside()
    weight = layer(model, 0).weight
    reads, other = hold(weight), hold(layer(bare(model), 0).weight)
    for _ in range(2):
        evict_all()
        assert record(weight).state is State.EVICTED
        assert torch.equal(reads(), other())
    with torch.no_grad():
        weight.add_(1)
    written = hold(weight.clone())()
    evict_all()
    assert record(weight).state is State.EVICTED
    assert torch.equal(reads(), written)


def no_transform() -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


@pytest.mark.parametrize("block", [no_transform, torch.inference_mode, forward_ad.dual_level])
def test_detached_evicted_weight_has_the_bytes_in_any_mode(
    nothing_left: None, block: Callable[[], Any]
) -> None:
    model = trained_beside()
    wanted = layer(bare(model), 0).weight
    evict_all()
    with block():
        found = layer(model, 0).weight.detach()
        assert torch.equal(found + 0, wanted)
    assert torch.equal(layer(model, 0).weight, wanted)


def test_detached_evicted_weight_has_the_bytes_under_vmap(nothing_left: None) -> None:
    model = trained_beside()
    wanted = layer(bare(model), 0).weight
    evict_all()
    found = torch.func.vmap(lambda row: layer(model, 0).weight.detach() @ row)(torch.eye(WIDTH))
    assert torch.equal(found.T, wanted)
