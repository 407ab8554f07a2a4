"""What kernels take for themselves is within the budget: seen once, and room is made for it from then on. In
RAM it is kernel by kernel; on a device that counts every byte, what else there is counts, too. RAM stands in
for its memory here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
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
from teraio.runtime.unseen import NOISE_BYTES, Unseen, steady

MIB = 2**20
WIDTH, LAYERS, BATCH, STEPS = 256, 6, 4096, 4
SCRATCH = 12 * MIB


class Tensors(RamDevice):
    """RAM as it is: tensors count, those of others do not."""

    highest = 0

    def reset_peak(self) -> None:
        self.highest = self.highest_bytes()
        super().reset_peak()

    def highest_bytes(self) -> int:
        return max(self.highest, self.peak_bytes())


class Counting(Tensors):
    """As a GPU's: all bytes count, whoever has them."""

    counts_all = True


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


@pytest.fixture(autouse=True, params=[Counting, Tensors])
def kind(
    request: pytest.FixtureRequest, one_thread: None, steady_plans: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Tensors]]:
    monkeypatch.setattr(device, "current", lambda kind=None: request.param())
    yield request.param
    teraio.reset()


on_a_gpu = pytest.mark.parametrize("kind", [Counting], indirect=True)
in_ram = pytest.mark.parametrize("kind", [Tensors], indirect=True)


def train(
    memory: int | None, steps: int = STEPS, kind: type[Tensors] = Counting
) -> tuple[list[float], list[int], int]:
    """Losses, the device's peak of each step, and what was there before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counting = kind()
    before = counting.used_bytes()
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"inner": "eager", "warmup": 1}
    if memory is not None:
        options["memory"] = memory + (before if kind.counts_all else 0)
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
    kind: type[Tensors], plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    budget = 52 * MIB
    with caplog.at_level(logging.WARNING, "teraio"):
        losses, peaks, before = train(budget, kind=kind)
    assert losses == plain
    assert max(peaks[1:]) <= budget
    assert session.SESSION is not None
    if kind.counts_all:
        assert session.SESSION.engine.residency.reserve_bytes >= before + SCRATCH
        assert teraio.stats()["device_peak_bytes"] <= before + budget
    assert teraio.stats()["evictions"] > 0
    if peaks[0] > budget:
        assert "kernel" in caplog.text and "(for itself)" in caplog.text


@on_a_gpu
def test_a_budget_that_it_does_not_fit_in_is_refused_with_the_reserve_in_the_message() -> None:
    with pytest.raises(BudgetError, match="in reserve"):
        train(24 * MIB)


@in_ram
def test_what_finds_no_room_in_ram_is_said_and_no_error(
    plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "teraio"):
        losses, peaks, _ = train(24 * MIB, kind=Tensors)
    assert losses == plain
    assert "kernel" in caplog.text and "(for itself)" in caplog.text
    assert teraio.stats()["overrun_bytes"] >= max(peaks[1:]) - 24 * MIB > 0


def test_where_nobody_looks_the_budget_is_exceeded(
    kind: type[Tensors], plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the test: without a look at what is not seen, steps take more than they may."""
    monkeypatch.setattr(Unseen, "arrives", lambda self, program, index: None)
    losses, peaks, _ = train(52 * MIB, kind=kind)
    assert losses == plain
    assert min(peaks[1:]) > 52 * MIB


def smallest(kind: type[Tensors], used: int, peak: int) -> tuple[Unseen, Residency, Any]:
    """A budget of 100 that may grow, 10 in reserve, 60 there by the ledger, of a kernel that told of 20."""
    residency = Residency.__new__(Residency)
    residency.reserve_bytes, residency.budget_bytes, residency.elastic = 10, 100, True

    class Peaks(kind):  # type: ignore[misc, valid-type]
        def used_bytes(self) -> int:
            return used

        def peak_bytes(self) -> int:
            return peak

        def reset_peak(self) -> None:
            pass

    mover = SimpleNamespace(resident_bytes=60, foreign_bytes=0, counted_bytes=60)
    residency.mover = mover  # type: ignore[assignment]
    residency.mortal = {}
    unseen = Unseen(residency, Peaks(), lambda short, place, who: pytest.fail("it is elastic"))
    program = SimpleNamespace(unseen_bytes=[0], stops=[SimpleNamespace(kernel="mm")])
    return unseen, residency, program


@on_a_gpu
def test_the_smallest_budget_grows_with_what_there_is() -> None:
    unseen, residency, program = smallest(Counting, used=70, peak=95)
    unseen.leaves(program, 0, 20)
    unseen.arrives(program, 0)
    assert (residency.reserve_bytes, residency.budget_bytes, program.unseen_bytes) == (15, 105, [0])
    unseen.arrives(program, 0)  # not looked at since
    assert residency.reserve_bytes == 15


@in_ram
def test_the_smallest_budget_grows_with_what_a_kernel_takes() -> None:
    """Of 7 bytes that others have when the call begins nothing counts."""
    more = 2 * NOISE_BYTES
    unseen, residency, program = smallest(Tensors, used=67, peak=67 + 20 + more)
    unseen.leaves(program, 0, 20)
    unseen.arrives(program, 0)
    assert program.unseen_bytes == [more]
    assert (residency.reserve_bytes, residency.budget_bytes) == (10, 60 + 20 + more + 10)
    unseen.leaves(program, 0, 20)
    unseen.arrives(program, 0)  # seen again: nothing is new
    assert (program.unseen_bytes, residency.budget_bytes) == ([more], 90 + more)


def test_what_a_kernel_takes_varies_by_a_few_bytes_and_counts_as_the_same() -> None:
    """Plans fill the budget: where a measured step tells of a little more than the one they were made from,
    moves find no room and others are made instead."""
    seen = [9 * NOISE_BYTES + more for more in (100, 1124, 90, NOISE_BYTES, 0, 1 - NOISE_BYTES)]
    told = [0]
    for each in seen:
        told.append(steady(told[-1], each))
        assert told[-1] >= each
    assert set(told[1:]) == {10 * NOISE_BYTES}
    assert steady(10 * NOISE_BYTES, 12 * NOISE_BYTES + 1) == 13 * NOISE_BYTES
    assert steady(10 * NOISE_BYTES, 4 * NOISE_BYTES) == 4 * NOISE_BYTES
    assert steady(0, NOISE_BYTES - 1) == 0 and steady(10 * NOISE_BYTES, 0) == 0
