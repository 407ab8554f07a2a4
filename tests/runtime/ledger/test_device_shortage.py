"""A device with less free memory than the budget, because other processes use its memory. No tensor loses its
bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from full_device import STEPS, Full, trained, trained_without_one_batch

import teraio

SIDE, ROWS = 256, 256
OPTIONS: dict[str, Any] = {"memory": "6.5MiB", "inner": "eager", "planner": "greedy", "warmup": 1}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, nothing_left: None) -> Iterator[Full]:
    yield Full(monkeypatch.setattr)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (part for _ in range(6) for part in (torch.nn.Linear(SIDE, SIDE), torch.nn.GELU()))
    return torch.nn.Sequential(*layers)


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, SIDE, generator=torch.Generator().manual_seed(step))


def test_fetch_without_device_memory_waits_or_evicts_others(
    full: Full, caplog: pytest.LogCaptureFixture
) -> None:
    full.once = True
    plain, made = model(), model()
    expected = trained(plain, plain, batch, None)
    assert trained(torch.compile(made, backend="teraio", options=OPTIONS), made, batch, full) == expected
    assert full.refused >= STEPS // 2 and teraio.stats()["evictions"]
    assert caplog.text.count("the device has no memory for") == 1, "the warning is logged once"


@pytest.mark.parametrize("after", [0, 3])
def test_loop_can_skip_a_batch_that_finds_no_device_memory(full: Full, after: int) -> None:
    made = model()
    called = torch.compile(made, backend="teraio", options=OPTIONS)
    left_out = trained_without_one_batch(called, made, batch, full, after, views=4)
    assert left_out == 1 and full.refused >= 2, "the fetch, and its retry after everything else was evicted"
