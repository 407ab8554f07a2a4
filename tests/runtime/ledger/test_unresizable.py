"""Tests of training loops that read weights and gradients through numpy.

The engine makes these tensors evictable again without a search for the objects that hold them. A numpy array
that still exists sees later writes to its tensor.
"""

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
BUDGET = "7MiB"  # the reserve takes 4 MiB of the budget, so 3 MiB are left; weights and gradients take 3 MiB
SLICE_BYTES = 4096

Hold = Callable[[nn.Linear], Any]


def train(look: Callable[[nn.Sequential], None], steps: int = 3) -> nn.Sequential:
    """Train, and call `look` with the model after each backward. Gradients accumulate over the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    options: dict[str, Any] = {"inner": "eager", "memory": BUDGET}
    compiled: Any = torch.compile(model, backend="teraio", options=options)
    for _ in range(steps):
        compiled(torch.ones(16, WIDTH)).square().mean().backward()
        look(model)
    return model


def test_tensors_shared_with_numpy_are_adopted_without_a_search(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the engine makes no search. A search through all Python objects for holders would take as
    long as dozens of steps of this model."""
    searches: list[str] = []
    real = adoption.make_resizable

    def searched(tensors: Any) -> adoption.Adopted:
        found = [*tensors]
        searches.extend(name for name, _ in found)
        return real(found)

    monkeypatch.setattr("teraio.runtime.ledger.unresizable.make_resizable", searched)

    def look(model: nn.Sequential) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.numpy().sum()
            parameter.detach().numpy().sum()
            assert not parameter.untyped_storage().resizable()

    train(look)
    assert searches == []
    running = engine.ENGINE
    assert running is not None and running.mover.counts.evictions > LAYERS


def _gradient(layer: nn.Linear) -> torch.Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


def _after_numpy(layer: nn.Linear) -> torch.Tensor:
    layer.weight.detach().numpy().sum()
    return layer.weight


# For each case: a holder of bytes, and the tensor that the holder must equal at the end.
HOLDS: dict[str, tuple[Hold, Hold]] = {
    "an array of a gradient": (
        lambda layer: _gradient(layer).numpy(),
        _gradient,
    ),
    "a slice of such an array": (
        lambda layer: _gradient(layer).numpy()[3:5],
        lambda layer: _gradient(layer)[3:5],
    ),
    "the memory of such an array": (
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
def test_holder_of_shared_bytes_sees_later_writes(one_thread: None, hold: Hold, seen: Hold) -> None:
    held: list[Any] = []

    def look(model: nn.Sequential) -> None:
        first = model[0]
        assert isinstance(first, nn.Linear)
        if not held:
            held.append(hold(first))
        with torch.no_grad():
            first.weight.mul_(2)

    model = train(look, steps=5)
    first = model[0]
    assert isinstance(first, nn.Linear)
    wanted = seen(first)
    kept = held[0]
    whole = isinstance(kept, torch.UntypedStorage)
    found = torch.empty(0).set_(kept) if whole else torch.as_tensor(np.asarray(kept))
    assert torch.equal(found, wanted)
