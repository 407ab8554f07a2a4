"""What kernels take for themselves is within the budget: seen once, and room is made for it from then on,
kernel by kernel. On a device that counts every byte, what stays there counts, too. RAM stands in for its
memory here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ram_device import RamDevice
from torch import nn

import teraio
from teraio.errors import BudgetError
from teraio.runtime.device import choose
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.step.kernel_workspace import NOISE_BYTES, KernelWorkspace, filter_noise
from teraio.session import session

MIB = 2**20
WIDTH, LAYERS, BATCH, STEPS = 256, 6, 4096, 4
SCRATCH = 12 * MIB
KEEPS = False
KEPT: list[torch.Tensor] = []
TRIES: list[int] = []


class Tensors(RamDevice):
    """RAM as it is: tensors count, those of others do not."""

    highest = 0

    def reset_peak(self) -> None:
        self.highest = self.highest_used_bytes()
        super().reset_peak()

    def highest_used_bytes(self) -> int:
        return max(self.highest, self.peak_bytes())


class Counting(Tensors):
    """As a GPU's: all bytes count, whoever has them."""

    counts_all = True


@torch.library.custom_op("teraio_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A kernel with a workspace that no one sees. Some keep it, some try another in their first runs."""
    if TRIES:
        torch.ones(TRIES.pop(), dtype=torch.uint8)
    if KEEPS and not KEPT:
        KEPT.append(torch.ones(SCRATCH, dtype=torch.uint8))
    scratch = KEPT[0] if KEEPS else torch.ones(SCRATCH, dtype=torch.uint8)
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
    monkeypatch.setattr(choose, "choose_device", lambda kind=None: request.param())
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
        peaks.append(here.highest_used_bytes() - before)
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
        assert before <= session.SESSION.engine.residency.reserve_bytes < before + SCRATCH
        assert teraio.stats()["device_peak_bytes"] <= before + budget
    assert teraio.stats()["evictions"] > 0
    if peaks[0] > budget:
        assert "kernel" in caplog.text and "(for itself)" in caplog.text


def test_what_finds_no_room_is_said_and_no_error(
    kind: type[Tensors], plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "teraio"):
        losses, peaks, _ = train(26 * MIB, kind=kind)
    assert losses == plain
    assert "kernel" in caplog.text and "(for itself)" in caplog.text
    assert teraio.stats()["overrun_bytes"] >= max(peaks[1:]) - 26 * MIB > 0


@on_a_gpu
def test_a_workspace_that_is_kept_is_in_reserve_and_a_budget_without_room_for_it_is_refused(
    plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "KEEPS", True)
    losses, peaks, before = train(52 * MIB)
    assert losses == plain
    assert max(peaks[1:]) <= 52 * MIB
    assert session.SESSION is not None
    assert session.SESSION.engine.residency.reserve_bytes >= before + SCRATCH
    teraio.reset()
    KEPT.clear()
    with pytest.raises(BudgetError, match="in reserve"):
        train(20 * MIB)
    KEPT.clear()


@on_a_gpu
def test_what_a_first_run_tries_is_not_counted_on_afterwards(plain: list[float]) -> None:
    """As Inductor's autotuner: a buffer that is there in the first run of a kernel, and never again."""
    budget = 36 * MIB
    TRIES.append(2 * SCRATCH)
    losses, peaks, before = train(budget)
    assert losses == plain
    assert not TRIES and peaks[0] > budget >= max(peaks[1:])
    assert session.SESSION is not None
    assert session.SESSION.engine.residency.reserve_bytes < before + SCRATCH


def test_where_nobody_looks_the_budget_is_exceeded(
    kind: type[Tensors], plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the test: without a look at what is not seen, steps take more than they may."""
    monkeypatch.setattr(KernelWorkspace, "end_kernel_measure", lambda self, program, index: 0)
    losses, peaks, _ = train(52 * MIB, kind=kind)
    assert losses == plain
    assert min(peaks[1:]) > 52 * MIB


class Peaks(Counting):
    """A device whose figures are given."""

    used = peak = tries = 0

    def used_bytes(self) -> int:
        return self.used

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        pass

    def autotuning_bytes(self, kernel: str) -> int:
        return self.tries


class Rig:
    """A budget of 100, 10 in reserve, 60 there by the ledger, and a kernel that told of 20."""

    def __init__(self, counts_all: bool, elastic: bool = False, unit: int = 1) -> None:
        self.residency = Residency.__new__(Residency)
        self.residency.reserve_bytes, self.residency.budget_bytes = 10 * unit, 100 * unit
        self.residency.kept_bytes, self.residency.elastic = 0, elastic
        counts = SimpleNamespace(peak_bytes=0)
        there = {
            "resident_bytes": 60 * unit,
            "device_counted_bytes": 60 * unit,
            "foreign_bytes": 0,
            "counts": counts,
        }
        self.residency.mover = SimpleNamespace(**there)  # type: ignore[assignment]
        self.residency.mortal, self.residency.records = {}, {}
        self.asked: list[int] = []
        self.residency.evict_until_fits = self.free  # type: ignore[method-assign, assignment]
        self.device = Peaks()
        self.device.counts_all = counts_all
        self.short: list[int] = []
        self.unseen = KernelWorkspace(
            self.residency, self.device, lambda short, place, who: self.short.append(short)
        )
        self.program: Any = SimpleNamespace(
            unseen_bytes=[0], tried_bytes=[None], stops=[SimpleNamespace(kernel="mm")]
        )
        self.unit = unit

    def free(self, live_bytes: int, tick: Any) -> tuple[int, None]:
        self.asked.append(live_bytes)
        return 0, None

    def runs(self, peak: int, after: int, before: int = 70) -> int:
        """The kernel once: the device's figures before it, at most, and after it. Returns what is new."""
        self.device.used = before * self.unit
        self.unseen.begin_kernel_measure(self.program, 0, 20 * self.unit)
        self.device.peak, self.device.used = peak * self.unit, after * self.unit
        return self.unseen.end_kernel_measure(self.program, 0)


@on_a_gpu
def test_the_smallest_budget_grows_with_what_stays() -> None:
    rig = Rig(counts_all=True, elastic=True)
    rig.runs(peak=95, after=95)
    assert (rig.residency.reserve_bytes, rig.residency.budget_bytes) == (15, 105)
    assert rig.program.unseen_bytes == [0] and rig.short == []
    rig.unseen.end_kernel_measure(rig.program, 0)  # not looked at since
    assert rig.residency.reserve_bytes == 15


@on_a_gpu
def test_what_comes_and_goes_is_the_kernels_own_and_its_first_run_does_not_decide() -> None:
    rig = Rig(counts_all=True, unit=NOISE_BYTES)
    assert rig.runs(peak=120, after=80) == 0
    assert rig.short == [20 * NOISE_BYTES], "it did not fit, and that is said"
    assert (rig.program.unseen_bytes, rig.program.tried_bytes) == ([0], [30 * NOISE_BYTES])
    assert rig.runs(peak=95, after=80) == 5 * NOISE_BYTES, "what the step tells the planner"
    assert (rig.program.unseen_bytes, rig.program.tried_bytes) == ([5 * NOISE_BYTES], [0])
    assert rig.residency.reserve_bytes == 10 * NOISE_BYTES
    assert rig.runs(peak=95, after=80) == 0


@on_a_gpu
def test_what_a_kernel_may_try_has_room_in_measured_runs_until_one_has_shown_what_it_takes() -> None:
    rig = Rig(counts_all=True, unit=NOISE_BYTES)
    rig.device.tries = 50 * NOISE_BYTES

    def asked(measured: bool) -> int:
        rig.asked.clear()
        rig.unseen.make_room_for_kernel(rig.program, 0, 20 * NOISE_BYTES, None, measured)
        return sum(rig.asked) // NOISE_BYTES

    assert (asked(True), asked(False)) == (70, 0)
    rig.runs(peak=120, after=80)
    assert (asked(True), asked(False)) == (50, 0)
    rig.runs(peak=85, after=80)
    assert (asked(True), asked(False)) == (0, 0)


@on_a_gpu
def test_the_reserve_is_what_is_there_beside_the_ledger_when_a_measured_step_begins() -> None:
    rig = Rig(counts_all=True)
    rig.runs(peak=100, after=99)
    assert rig.residency.reserve_bytes == 19
    rig.device.used = 85
    rig.unseen.measure_and_reserve_lasting_bytes(
        step=False
    )  # another program: something of the kernel's may be there still
    assert rig.residency.reserve_bytes == 25
    rig.device.used = 74
    rig.unseen.measure_and_reserve_lasting_bytes(step=True)
    assert rig.residency.reserve_bytes == 14
    rig.device.used = 61
    rig.unseen.measure_and_reserve_lasting_bytes(step=True)
    assert rig.residency.reserve_bytes == 10, "never less than it began with"


@in_ram
def test_the_smallest_budget_grows_with_what_a_kernel_takes() -> None:
    """Of 7 bytes that others have when the call begins nothing counts."""
    more = 2 * NOISE_BYTES
    rig = Rig(counts_all=False, elastic=True)
    assert rig.runs(before=67, peak=67 + 20 + more, after=67) == more
    assert rig.program.unseen_bytes == [more]
    assert (rig.residency.reserve_bytes, rig.residency.budget_bytes) == (10, 60 + 20 + more + 10)
    assert rig.runs(before=67, peak=67 + 20 + more, after=67) == 0, "seen again: nothing is new"
    assert (rig.program.unseen_bytes, rig.residency.budget_bytes) == ([more], 90 + more)


def test_what_a_kernel_takes_varies_by_a_few_bytes_and_counts_as_the_same() -> None:
    """Plans fill the budget: where a measured step tells of a little more than the one they were made from,
    moves find no room and others are made instead."""
    seen = [9 * NOISE_BYTES + more for more in (100, 1124, 90, NOISE_BYTES, 0, 1 - NOISE_BYTES)]
    told = [0]
    for each in seen:
        told.append(filter_noise(told[-1], each))
        assert told[-1] >= each
    assert set(told[1:]) == {10 * NOISE_BYTES}
    assert filter_noise(10 * NOISE_BYTES, 12 * NOISE_BYTES + 1) == 13 * NOISE_BYTES
    assert filter_noise(10 * NOISE_BYTES, 4 * NOISE_BYTES) == 4 * NOISE_BYTES
    assert filter_noise(0, NOISE_BYTES - 1) == 0 and filter_noise(10 * NOISE_BYTES, 0) == 0
