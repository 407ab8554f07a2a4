"""The device has less memory than the budget: others took it. Nothing is lost, and nothing is read unseen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import teraio
from teraio.runtime.device import Ordered

SIDE, ROWS, STEPS, FULL_STEP = 256, 256, 8, 5
OPTIONS: dict[str, Any] = {"memory": "6.5MiB", "inner": "eager", "planner": "greedy", "warmup": 1}


class Full:
    """Makes fetches fail as torch's allocator does, from the one with this number on, or only that one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.after, self.once = False, 0, False
        self.refused = self.seen = 0
        begin = Ordered.begin_fetch

        def begin_fetch(device: Any, storage: Any, size_bytes: int, start: Any) -> Any:
            self.seen += self.now
            if self.now and self.seen > self.after:
                self.refused += 1
                self.now = not self.once
                raise torch.OutOfMemoryError("out of memory. Tried to allocate ...")
            return begin(device, storage, size_bytes, start)

        monkeypatch.setattr(Ordered, "begin_fetch", begin_fetch)

    def begins(self, after: int) -> None:
        self.now, self.seen, self.after = True, 0, after


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> Iterator[Full]:
    yield Full(monkeypatch)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (part for _ in range(6) for part in (torch.nn.Linear(SIDE, SIDE), torch.nn.GELU()))
    return torch.nn.Sequential(*layers)


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, SIDE, generator=torch.Generator().manual_seed(step))


def trained(full: Full | None) -> list[float]:
    """Losses; with `full`, another fetch of each step finds no memory."""
    made = model()
    called: Any = made
    if full is not None:
        called = torch.compile(made, backend="teraio", options=OPTIONS)
    optimizer, losses = torch.optim.SGD(made.parameters(), lr=0.1), []
    for step in range(STEPS):
        if full is not None:
            full.begins(after=step)
        loss = called(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_fetch_that_finds_no_memory_is_put_off_or_makes_room(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    full.once = True
    expected = trained(None)
    assert trained(full) == expected
    assert full.refused >= STEPS // 2 and teraio.stats()["evictions"]
    assert caplog.text.count("the device has no memory for") == 1, "once"


@pytest.mark.parametrize("after", [0, 3])
def test_a_batch_that_finds_no_memory_can_be_left_out_as_loops_do(full: Full, after: int) -> None:
    """The weights are those of before, and whoever reads them or a view of them gets them."""
    made = model()
    weights = list(made.parameters())
    views = [weight.detach() for weight in weights[:4]]
    called = torch.compile(made, backend="teraio", options=OPTIONS)
    optimizer, left_out = torch.optim.SGD(weights, lr=0.1), 0
    for step in range(STEPS):
        before = [weight.detach().clone() for weight in weights]
        if step == FULL_STEP:
            full.begins(after)
        try:
            loss = called(batch(step)).square().mean()
            loss.backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            full.now, left_out = False, left_out + 1
            assert all(torch.equal(weight, old) for weight, old in zip(weights, before))
            assert all(torch.equal(view, old) for view, old in zip(views, before))
        full.now = False
        optimizer.zero_grad()
    assert torch.isfinite(loss)
    assert left_out == 1 and full.refused >= 2, "the fetch, and once more after all has left"
