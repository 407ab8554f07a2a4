"""A model that runs partly in compiled programs and partly in eager code, and a function that evicts its
weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import Record, State

WIDTH = 256

Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def trained_beside() -> nn.Module:
    """Return a model whose weights are evictable, because it has trained for two steps. No compiled program
    contains the model's last layer.
    """
    model = three_layers()
    compiled = torch.compile(model[:2], backend="teraio", options={"inner": "eager", "memory": "64MiB"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        layer(model, 2)(compiled(torch.ones(4, WIDTH))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def three_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def layer(model: nn.Module, number: int) -> nn.Linear:
    found = model[number]  # type: ignore[index]
    assert isinstance(found, nn.Linear)
    return found


def record(tensor: torch.Tensor) -> Record:
    assert engine.ENGINE is not None
    return engine.ENGINE.known_tensors.records[id(tensor)]


def evict_all() -> int:
    """Evict every evictable tensor, and return the number of evicted tensors. Before that, forget which
    addresses user code took, because a taken address blocks the eviction of its tensor.
    """
    assert engine.ENGINE is not None
    user, residency = engine.ENGINE.user, engine.ENGINE.residency
    assert user.observer is not None
    user.observer.forget_taken_addresses()
    residency.advance_slot()
    before = residency.mover.counts.evictions
    residency.evict_until_fits(2**40, None, user.must_be_resident)
    return residency.mover.counts.evictions - before


def inputs() -> torch.Tensor:
    return torch.arange(4.0 * WIDTH).reshape(4, WIDTH).div(1000).requires_grad_()


def bare(model: nn.Module) -> nn.Module:
    """Return a copy of the model that the engine does not know. The copy has the same weights."""
    copy = three_layers()
    copy.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return copy


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def gradients(use: Use, model: nn.Module, evicted: bool) -> list[torch.Tensor]:
    """Call `use` with the model and an input, and run a backward. Return the gradients of the input and of
    the used weights. If `evicted` is True, evict the weights before the backward.
    """
    x = inputs()
    made = use(model, x)
    if evicted:
        evict_all()
        assert record(layer(model, 0).weight).state is State.EVICTED
    made.square().sum().backward()
    found = [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return [gradient for gradient in found if gradient is not None]
