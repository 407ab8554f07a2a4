"""Which weights are in a graph that eager code made: for as long as the graph is there, and no longer."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from teraio.runtime import engine
from teraio.runtime.edges import Call, alive, edges_of


def weight() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


def edges_after(func: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """What the function gives, and what that put into a graph."""
    made = func(*given)
    return made, edges_of([given[0]], Call(made, given, 0))


def test_an_edge_lives_as_long_as_its_graph() -> None:
    made, edges = edges_after(torch.square, weight())
    assert len(edges) == 1 == len(alive(edges))
    total = made.sum()
    del made
    assert alive(edges), "the sum's graph goes through it"
    del total
    gc.collect()
    assert not alive(edges)


def test_a_backward_passes_it_and_changes_nothing() -> None:
    leaf = weight()
    made, edges = edges_after(torch.square, leaf)
    made.sum().backward()
    assert edges and leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    "use",
    [lambda w: w.detach().clone(), lambda w: w.tolist(), lambda w: w.shape, lambda w: w.data.norm().item()],
    ids=["detached", "numbers", "shape", "data"],
)
def test_what_makes_no_graph_makes_no_edge(use: Callable[[torch.Tensor], Any]) -> None:
    assert edges_after(use, weight())[1] == []


def test_without_grad_mode_or_of_a_frozen_weight_there_is_none() -> None:
    with torch.no_grad():
        assert edges_after(torch.square, weight())[1] == []
    assert edges_after(torch.square, torch.ones(4))[1] == []


def test_what_is_changed_in_place_is_in_the_graph_too() -> None:
    into = torch.zeros(4)
    _, edges = edges_after(lambda w, others: torch._foreach_add_(others, [w]), weight(), [into])
    assert len(alive(edges)) == 1
    into = torch.zeros(2, 4)
    _, edges = edges_after(lambda w, other: other.__setitem__(0, w), weight(), into)
    assert len(alive(edges)) == 1


def test_what_cannot_be_looked_into_may_hold_one() -> None:
    assert edges_after(iter, weight())[1] is None
    seen: list[Any] = []

    def loss(w: torch.Tensor) -> torch.Tensor:
        made, edges = edges_after(torch.square, w)
        seen.append(edges)
        return made.sum()

    torch.func.grad(loss)(weight())
    assert seen == [None]


@pytest.fixture
def trained(nothing_left: None) -> nn.Module:
    """A model whose weights wear the guard, after a step."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    compiled = torch.compile(model, backend="teraio", options={"inner": "eager", "memory": "64MiB"})
    compiled(torch.randn(8, 256)).square().mean().backward()
    return model


def in_graphs() -> set[str]:
    assert engine.ENGINE is not None
    return {r.name for r in engine.ENGINE.residency.records.values() if r.in_a_graph()}


def test_what_is_saved_or_logged_leaves_gradients_free_to_leave(trained: nn.Module) -> None:
    copies = {name: value.clone() for name, value in trained.state_dict().items()}
    norms = [parameter.norm().item() for parameter in trained.parameters()]
    assert len(copies) == len(norms) == 4
    assert in_graphs() == set()


def test_a_penalty_keeps_them_as_long_as_it_is_there(trained: nn.Module) -> None:
    first: nn.Linear = trained[0]  # type: ignore[index]
    penalty = first.weight.square().sum() * 2
    assert in_graphs() == {"0.weight"}
    del penalty
    gc.collect()
    assert in_graphs() == set()


def test_a_pickled_model_is_in_no_graph(nothing_left: None) -> None:
    """Though the storages in what is pickled are nothing that it could be seen of."""
    model = nn.Linear(64, 64)
    options: dict[str, Any] = {"inner": "eager", "memory": "64MiB"}
    compiled: Any = torch.compile(model, backend="teraio", options=options)
    compiled(torch.ones(2, 64)).sum().backward()
    assert engine.ENGINE is not None
    records = engine.ENGINE.guard.records
    assert len(pickle.dumps(model)) > 64 * 64 * 4
    assert not records[id(model.weight)].in_a_graph()
    kept = torch.nn.functional.linear(torch.ones(2, 64), model.weight)
    assert records[id(model.weight)].in_a_graph()
    del kept
