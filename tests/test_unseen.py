"""What kernels take for themselves, and what else there is on a device that counts every byte, is within the
budget: seen once, and room is made for it from then on. Here RAM stands in for a GPU's memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ram_device import RamDevice
from torch import nn

import teraio
from teraio import session
from teraio.errors import BudgetError
from teraio.runtime import device
from teraio.runtime.residency import Residency
from teraio.runtime.unseen import Unseen

MIB = 2**20
WIDTH, LAYERS, BATCH, STEPS = 256, 6, 4096, 4
SCRATCH = 12 * MIB


class Counting(RamDevice):
    """As a GPU's: all bytes count, whoever has them."""

    counts_all = True
    highest = 0

    def reset_peak(self) -> None:
        self.highest = self.highest_bytes()
        super().reset_peak()

    def highest_bytes(self) -> int:
        return max(self.highest, self.peak_bytes())


@torch.library.custom_op("teraio_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A kernel with a workspace that no one sees."""
    scratch = torch.ones(SCRATCH, dtype=torch.uint8)
    return x * 2 * scratch[0]


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: doubled(gradient))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 0.1
            x = doubled(x)
        loss: torch.Tensor = x.square().mean()
        return loss


@pytest.fixture(autouse=True)
def _counting(one_thread: None, steady_plans: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "current", lambda kind=None: Counting())
    yield
    teraio.reset()


def train(memory: int | None, steps: int = STEPS) -> tuple[list[float], list[int], int]:
    """Losses, the device's peak of each step, and what was there before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counting = Counting()
    before = counting.used_bytes()
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"inner": "eager", "warmup": 1}
    if memory is not None:
        options["memory"] = before + memory
    compiled: Any = torch.compile(model, backend="teraio", options=options)
    losses, peaks = [], []
    for step in range(steps):
        counting.reset_peak()
        if session.SESSION is not None:
            session.SESSION.device.highest = 0  # type: ignore[attr-defined]
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = compiled(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()))
        here: Any = session.SESSION.device if session.SESSION is not None else counting
        peaks.append(here.highest_bytes() - before)
    return losses, peaks, before


@pytest.fixture(scope="module")
def plain() -> list[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as disabled:
        disabled.setenv("TERAIO_DISABLE", "1")
        losses, peaks, _ = train(None)
    torch.set_num_threads(threads)
    assert max(peaks) > 65 * MIB, "or there is nothing to save"
    return losses


def test_what_kernels_take_is_seen_once_and_has_room_from_then_on(
    plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    budget = 52 * MIB
    with caplog.at_level(logging.WARNING, "teraio"):
        losses, peaks, before = train(budget)
    assert losses == plain
    assert max(peaks[1:]) <= budget
    assert session.SESSION is not None
    assert session.SESSION.engine.residency.reserve_bytes >= before + SCRATCH
    assert teraio.stats()["device_peak_bytes"] <= before + budget
    assert teraio.stats()["evictions"] > 0
    if peaks[0] > budget:
        assert "kernel" in caplog.text and "(for itself)" in caplog.text


def test_a_budget_that_it_does_not_fit_in_is_refused_with_the_reserve_in_the_message() -> None:
    with pytest.raises(BudgetError, match="in reserve"):
        train(24 * MIB)


def test_where_nobody_looks_the_budget_is_exceeded(
    plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the test: without a look at what is not seen, steps take more than they may."""
    monkeypatch.setattr(Unseen, "arrives", lambda self, kernel: None)
    losses, peaks, _ = train(52 * MIB)
    assert losses == plain
    assert min(peaks[1:]) > 52 * MIB


def test_the_smallest_budget_grows_with_it() -> None:
    residency = Residency.__new__(Residency)
    residency.reserve_bytes, residency.budget_bytes, residency.elastic = 10, 100, True

    class Peaks(Counting):
        def peak_bytes(self) -> int:
            return 95

        def reset_peak(self) -> None:
            pass

    class Mover:
        resident_bytes = 60

    residency.mover = Mover()  # type: ignore[assignment]
    unseen = Unseen(residency, Peaks(), lambda short, place, who: pytest.fail("it is elastic"))
    unseen.leaves(live_bytes=20)
    unseen.arrives("mm")
    assert (residency.reserve_bytes, residency.budget_bytes) == (15, 105)
    unseen.arrives("mm")  # not looked at since
    assert residency.reserve_bytes == 15
