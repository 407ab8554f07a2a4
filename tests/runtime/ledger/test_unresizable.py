"""A loop that looks at weights and gradients through numpy: what numpy has had moves again, at no cost that
anyone would notice; whoever still has it goes on seeing what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from teraio.runtime.engine import engine
from teraio.runtime.ledger import adoption

WIDTH, LAYERS = 256, 6
BUDGET = "7MiB"  # 4 MiB of it in reserve; weights and gradients are 3 MiB
SLICE_BYTES = 4096

Hold = Callable[[nn.Linear], Any]


def looks(looked: Callable[[nn.Sequential], None], steps: int = 3) -> nn.Sequential:
    """A training whose loop looks at its model after each backward; gradients add up."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    options: dict[str, Any] = {"inner": "eager", "memory": BUDGET}
    compiled: Any = torch.compile(model, backend="teraio", options=options)
    for _ in range(steps):
        compiled(torch.ones(16, WIDTH)).square().mean().backward()
        looked(model)
    return model


def test_what_numpy_had_is_adopted_without_a_search(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search through all objects takes as long as dozens of steps of this model."""
    searches: list[str] = []
    real = adoption.make_resizable

    def searched(tensors: Any) -> adoption.Adopted:
        found = [*tensors]
        searches.extend(name for name, _ in found)
        return real(found)

    monkeypatch.setattr("teraio.runtime.ledger.unresizable.make_resizable", searched)

    def looked(model: nn.Sequential) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.numpy().sum()
            parameter.detach().numpy().sum()
            assert not parameter.untyped_storage().resizable()

    looks(looked)
    assert searches == []
    running = engine.ENGINE
    assert running is not None and running.mover.counts.evictions > LAYERS


def _gradient(layer: nn.Linear) -> torch.Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


def _after_numpy(layer: nn.Linear) -> torch.Tensor:
    layer.weight.detach().numpy().sum()
    return layer.weight


HOLDS: dict[str, tuple[Hold, Hold]] = {  # what is kept, and what it must be like at the end
    "an array of a gradient": (
        lambda layer: _gradient(layer).numpy(),
        _gradient,
    ),
    "a part of one": (
        lambda layer: _gradient(layer).numpy()[3:5],
        lambda layer: _gradient(layer)[3:5],
    ),
    "the memory of one": (
        lambda layer: memoryview(_gradient(layer).numpy()),  # type: ignore[arg-type]
        _gradient,
    ),
    "an array of a weight": (
        lambda layer: layer.weight.detach().numpy(),
        lambda layer: layer.weight.detach(),
    ),
    "an array of a state dict": (
        lambda layer: layer.state_dict()["weight"].numpy(),
        lambda layer: layer.weight.detach(),
    ),
    "a slice of a storage": (
        lambda layer: _after_numpy(layer).untyped_storage()[:SLICE_BYTES],
        lambda layer: layer.weight.detach().flatten()[: SLICE_BYTES // 4],
    ),
    "a capsule of DLPack": (
        lambda layer: np.from_dlpack(_after_numpy(layer).detach()),
        lambda layer: layer.weight.detach(),
    ),
}


@pytest.mark.parametrize(("hold", "seen"), HOLDS.values(), ids=HOLDS)
def test_whoever_holds_the_bytes_goes_on_seeing_them(one_thread: None, hold: Hold, seen: Hold) -> None:
    held: list[Any] = []

    def looked(model: nn.Sequential) -> None:
        first = model[0]
        assert isinstance(first, nn.Linear)
        if not held:
            held.append(hold(first))
        with torch.no_grad():
            first.weight.mul_(2)

    model = looks(looked, steps=5)
    first = model[0]
    assert isinstance(first, nn.Linear)
    wanted = seen(first)
    kept = held[0]
    whole = isinstance(kept, torch.UntypedStorage)
    found = torch.empty(0).set_(kept) if whole else torch.as_tensor(np.asarray(kept))
    assert torch.equal(found, wanted)
