"""The memory that kernels allocate as workspace. The engine measures this memory once, and makes room for it
in later runs of the kernel.

On a device that counts every byte, workspace that a kernel keeps after its run also counts. RAM stands in for
the memory of such a device.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ram_device import RamDevice
from torch import nn

import teraio
from teraio.errors import BudgetError
from teraio.formats.schedule import Schedule, Slot
from teraio.runtime.device import choose
from teraio.runtime.ledger.mover import MoveCounts, Mover
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.step.kernel_workspace import NOISE_BYTES, KernelWorkspace, filter_noise
from teraio.runtime.step.program import Program
from teraio.session import session

MIB = 2**20
WIDTH, LAYERS, BATCH, STEPS = 256, 6, 4096, 4
SCRATCH = 12 * MIB
KEEPS = False
KEPT: list[torch.Tensor] = []
TRIES: list[int] = []


class Tensors(RamDevice):
    """RAM as a device. Tensors of the ledger count in the budget, and other tensors do not."""

    highest = 0

    def reset_peak(self) -> None:
        self.highest = self.highest_used_bytes()
        super().reset_peak()

    def highest_used_bytes(self) -> int:
        return max(self.highest, self.peak_bytes())


class Counting(Tensors):
    """RAM that counts as the memory of a GPU does: all allocated bytes count in the budget."""

    counts_all = True


@torch.library.custom_op("teraio_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Return `x` doubled, by a kernel with a workspace.

    If `KEEPS` is True, the kernel keeps its workspace. In its first runs, the kernel also allocates buffers
    of the sizes in `TRIES`.
    """
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
    """Train.

    Return (1) the losses, (2) the device's peak in each step, and (3) the number of bytes that were in use
    before the training.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    gc.collect()  # garbage of other tests would otherwise be freed in the middle of this test
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
        device: Any = session.SESSION.device if session.SESSION is not None else counting
        peaks.append(device.highest_used_bytes() - before)
    return losses, peaks, before


@pytest.fixture(scope="module")
def plain() -> list[float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as disabled:
        disabled.setenv("TERAIO_DISABLE", "1")
        losses, peaks, _ = train(None)
    torch.set_num_threads(threads)
    assert max(peaks) > 65 * MIB, "the model fits the budgets below without evictions"
    return losses


def test_workspace_gets_room_after_it_was_measured_once(
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


def test_workspace_without_room_is_logged_and_no_error(
    kind: type[Tensors], plain: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "teraio"):
        losses, peaks, _ = train(26 * MIB, kind=kind)
    assert losses == plain
    assert "kernel" in caplog.text and "(for itself)" in caplog.text
    assert teraio.stats()["overrun_bytes"] >= max(peaks[1:]) - 26 * MIB > 0


@on_a_gpu
def test_lasting_workspace_is_in_reserve_and_budget_without_room_is_refused(
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
def test_buffer_of_the_first_run_alone_does_not_count_later(plain: list[float]) -> None:
    """Run a kernel that allocates a large buffer in its first run only. Inductor's autotuner does the
    same."""
    budget = 36 * MIB
    TRIES.append(2 * SCRATCH)
    losses, peaks, before = train(budget)
    assert losses == plain
    assert not TRIES and peaks[0] > budget >= max(peaks[1:])
    assert session.SESSION is not None
    assert session.SESSION.engine.residency.reserve_bytes < before + SCRATCH


def test_budget_is_exceeded_if_workspace_is_not_measured(
    kind: type[Tensors], plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switch off the measurement of workspace. Steps then exceed the budget.

    The excess shows that the tests above can fail.
    """
    monkeypatch.setattr(KernelWorkspace, "end_kernel_measure", lambda self, program, index: 0)
    losses, peaks, _ = train(52 * MIB, kind=kind)
    assert losses == plain
    assert min(peaks[1:]) > 52 * MIB


class Peaks(Counting):
    """A device on which a test sets the used bytes and the peak."""

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
    """A budget of 100 units, of which the reserve takes 10.

    Tensors of the ledger take 60 units. The schedule counts 20 more units for the kernel.
    """

    def __init__(self, counts_all: bool, elastic: bool = False, unit: int = 1) -> None:
        self.residency = Residency.__new__(Residency)
        self.residency.reserve_bytes, self.residency.budget_bytes = 10 * unit, 100 * unit
        self.residency.kept_bytes, self.residency.elastic = 0, elastic
        self.residency.mover = mover = Mover.__new__(Mover)
        mover.resident_bytes, mover.foreign_bytes, mover.recorder = 60 * unit, 0, None
        mover.counts = MoveCounts()
        self.residency.mortal, self.residency.records = {}, {}
        self.requested: list[int] = []
        self.residency.evict_until_fits = self.free  # type: ignore[method-assign, assignment]
        self.device = Peaks()
        self.device.counts_all = counts_all
        mover.device = self.device
        self.unseen = KernelWorkspace(self.residency, self.device)
        self.program = Program(Schedule("forward", (), (Slot("mm", (), (), 0),)))
        self.unit = unit

    @property
    def overrun_bytes(self) -> int:
        """Return the largest number of bytes by which a kernel exceeded the budget."""
        return self.residency.mover.counts.overrun_bytes

    def free(self, live_bytes: int, tick: Any) -> tuple[int, None]:
        self.requested.append(live_bytes)
        return 0, None

    def runs(self, peak: int, after: int, before: int = 70) -> int:
        """Run the kernel once, on a device that reports these numbers of used bytes.

        Return the growth of the kernel's workspace.
        """
        self.device.used = before * self.unit
        self.unseen.begin_kernel_measure(self.program, 0, 20 * self.unit)
        self.device.peak, self.device.used = peak * self.unit, after * self.unit
        return self.unseen.end_kernel_measure(self.program, 0)


@on_a_gpu
def test_elastic_budget_grows_with_lasting_workspace() -> None:
    rig = Rig(counts_all=True, elastic=True)
    rig.runs(peak=95, after=95)
    assert (rig.residency.reserve_bytes, rig.residency.budget_bytes) == (15, 105)
    assert rig.program.unseen_bytes == [0] and rig.overrun_bytes == 0
    rig.unseen.end_kernel_measure(rig.program, 0)  # no measurement has begun since the last one ended
    assert rig.residency.reserve_bytes == 15


@on_a_gpu
def test_freed_workspace_is_the_kernels_own_from_its_second_run() -> None:
    rig = Rig(counts_all=True, unit=NOISE_BYTES)
    assert rig.runs(peak=120, after=80) == 0
    assert rig.overrun_bytes == 20 * NOISE_BYTES
    assert (rig.program.unseen_bytes, rig.program.tried_bytes) == ([0], [30 * NOISE_BYTES])
    assert rig.runs(peak=95, after=80) == 5 * NOISE_BYTES, "the step adds these bytes for the planner"
    assert (rig.program.unseen_bytes, rig.program.tried_bytes) == ([5 * NOISE_BYTES], [0])
    assert rig.residency.reserve_bytes == 10 * NOISE_BYTES
    assert rig.runs(peak=95, after=80) == 0


@on_a_gpu
def test_autotuning_buffer_gets_room_only_in_measured_runs_until_workspace_is_known() -> None:
    rig = Rig(counts_all=True, unit=NOISE_BYTES)
    rig.device.tries = 50 * NOISE_BYTES

    def requested(measured: bool) -> int:
        rig.requested.clear()
        rig.unseen.make_room_for_kernel(rig.program, 0, 20 * NOISE_BYTES, None, measured)
        return sum(rig.requested) // NOISE_BYTES

    assert (requested(True), requested(False)) == (70, 0)
    rig.runs(peak=120, after=80)
    assert (requested(True), requested(False)) == (50, 0)
    rig.runs(peak=85, after=80)
    assert (requested(True), requested(False)) == (0, 0)


@on_a_gpu
def test_reserve_is_set_to_bytes_outside_the_ledger_when_a_measured_step_begins() -> None:
    rig = Rig(counts_all=True)
    rig.runs(peak=100, after=99)
    assert rig.residency.reserve_bytes == 19
    rig.device.used = 85
    # In the middle of a step, kernels that ran earlier may still hold memory, so these bytes count in the
    # reserve.
    rig.unseen.measure_and_reserve_lasting_bytes(step=False)
    assert rig.residency.reserve_bytes == 25
    rig.device.used = 74
    rig.unseen.measure_and_reserve_lasting_bytes(step=True)
    assert rig.residency.reserve_bytes == 14
    rig.device.used = 61
    rig.unseen.measure_and_reserve_lasting_bytes(step=True)
    assert rig.residency.reserve_bytes == 10, "the reserve is never less than its first value"


@in_ram
def test_elastic_budget_grows_with_a_kernels_own_workspace() -> None:
    """Check that memory outside the ledger, 7 bytes when the call begins, does not count as workspace."""
    more = 2 * NOISE_BYTES
    rig = Rig(counts_all=False, elastic=True)
    assert rig.runs(before=67, peak=67 + 20 + more, after=67) == more
    assert rig.program.unseen_bytes == [more]
    assert (rig.residency.reserve_bytes, rig.residency.budget_bytes) == (10, 60 + 20 + more + 10)
    assert rig.runs(before=67, peak=67 + 20 + more, after=67) == 0, "measured again, it has not grown"
    assert (rig.program.unseen_bytes, rig.residency.budget_bytes) == ([more], 90 + more)


def test_workspace_that_varies_by_a_few_bytes_counts_as_unchanged() -> None:
    """Check that the engine ignores a growth of the workspace by a few bytes.

    A plan may fill the whole budget. If a later step counted a few more bytes than the plan, the plan's moves
    would find no room.
    """
    measured = [9 * NOISE_BYTES + more for more in (100, 1124, 90, NOISE_BYTES, 0, 1 - NOISE_BYTES)]
    counted = [0]
    for each in measured:
        counted.append(filter_noise(counted[-1], each))
        assert counted[-1] >= each
    assert set(counted[1:]) == {10 * NOISE_BYTES}
    assert filter_noise(10 * NOISE_BYTES, 12 * NOISE_BYTES + 1) == 13 * NOISE_BYTES
    assert filter_noise(10 * NOISE_BYTES, 4 * NOISE_BYTES) == 4 * NOISE_BYTES
    assert filter_noise(0, NOISE_BYTES - 1) == 0 and filter_noise(10 * NOISE_BYTES, 0) == 0
