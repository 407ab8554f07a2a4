"""The optimizer's step on the host. Torch's fused CPU kernels give the same results as on the device, and the
states are only on the host.

RAM stands in for a device that has its own memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fetched import fetched
from host_loops import LOOPS, MIB, ON_DEVICE, Training, adamw
from ram_device import Late, Ram, RamDevice
from torch import nn

import teraio
from teraio.errors import TeraioError, UnsupportedError
from teraio.options import Settings
from teraio.runtime.device import choose, cpu
from teraio.runtime.device.link_rates import LinkRates
from teraio.runtime.engine import engine
from teraio.runtime.ledger.record import HOST, Record, State
from teraio.runtime.ledger.residency import Residency
from teraio.runtime.optimizer import host_step
from teraio.runtime.store.store import Store
from teraio.session import host_choice, session, tiers


@pytest.fixture(autouse=True)
def beside(one_thread: None, steady_plans: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that gives the device a host tier of a given size.

    The function returns a list. During the training, the list receives an entry for each bucket that is
    stepped on the host.
    """

    def of(limit_bytes: int = 64 * MIB, kind: type[RamDevice] = RamDevice) -> list[Any]:
        monkeypatch.setattr(choose, "choose_device", lambda _=None: kind())
        monkeypatch.setattr(tiers, "host_limit_bytes", lambda options: limit_bytes)
        monkeypatch.setattr(session, "refuse_host_options_without_gpu", lambda options, kind: None)
        steps: list[Any] = []
        step = host_step.HostStep.step_bucket

        def counted(self: Any, *arguments: Any) -> None:
            steps.append(arguments)
            step(self, *arguments)

        monkeypatch.setattr(host_step.HostStep, "step_bucket", counted)
        return steps

    return of


@cache
def plain(name: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as disabled:
        disabled.setenv("TERAIO_DISABLE", "1")
        return LOOPS[name]().run(optimizer_step="device")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = (
        len(one[name]) == len(other[name]) and all(map(torch.equal, one[name], other[name]))
        for name in ("weights", "states")
    )
    return one["seen"] == other["seen"] and all(tensors)


@pytest.mark.parametrize("name", LOOPS)
def test_host_step_gives_the_numbers_of_the_fused_kernels(
    name: str, beside: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    steps = beside()
    with caplog.at_level(logging.WARNING, "teraio"), fetched() as found:
        assert same(LOOPS[name]().run(), plain(name))
    late = [place for place, kind in found if kind == "weight" and place.startswith("aten::_foreach")]
    assert not late, "an update waits for a weight that is lent to it"
    assert bool(steps) == (name not in ON_DEVICE)
    lines = [record.getMessage() for record in caplog.records if "steps on the device" in record.getMessage()]
    reason = ON_DEVICE.get(name, "")
    assert len(lines) == bool(reason)
    assert all(reason in line for line in lines)


@pytest.mark.parametrize("limit", [MIB // 2, MIB // 8])
def test_tensors_without_a_host_place_are_copied_to_the_host_and_back(
    limit: int, beside: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    steps = beside(limit)
    with caplog.at_level(logging.WARNING, "teraio"):
        assert same(LOOPS["writes"]().run(), plain("writes"))
    assert steps
    assert len([r for r in caplog.records if "host memory is full" in r.getMessage()]) == 1


def test_host_step_waits_for_copies_in_flight(beside: Callable[..., list[Any]]) -> None:
    """Use a device whose copies to host memory end only when the host or the device waits for them."""
    steps = beside(kind=Late)
    assert same(LOOPS["writes"]().run(), plain("writes"))
    assert steps and Late.arrived_late > 20


def test_states_are_never_fetched_to_the_device(beside: Callable[..., list[Any]]) -> None:
    """Check that all states are evicted from the second step on, and that their copies are in host memory."""
    beside()
    where: list[tuple[str, State, str | None]] = []
    came = [0]

    def look(training: Training) -> None:
        records = engine.ENGINE.residency.records.values()  # type: ignore[union-attr]
        if training.number == 1:
            came[0] = teraio.stats()["from_host_bytes"]
        if training.number > 1:
            where.extend((r.name, r.state, r.copy_tier) for r in records if r.kind == "state")

    training = Training(adamw, look)
    training.run(memory=64 * MIB)
    assert len(where) > 12
    assert {(state, home) for _, state, home in where} == {(State.EVICTED, HOST)}


class Stumbles:
    """A replacement of torch's own step. It raises an error after the update of the `at`-th bucket."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.run = at, 0, host_step._run_step_on_twins

    def __call__(self, *arguments: Any) -> None:
        self.count += 1
        self.run(*arguments)
        if self.count == self.at:
            raise RuntimeError("stumbled")


@pytest.mark.parametrize("at", [1, 2, 4])
def test_failed_host_step_keeps_the_updates_of_its_finished_buckets(
    at: int, beside: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a failed step leaves each bucket whole: its weights and its states are from the same step.

    The training can continue, as with torch alone.
    """
    beside()
    stumbles = Stumbles(at)
    monkeypatch.setattr(host_step, "_run_step_on_twins", stumbles)

    class Goes(Training):
        def step(self) -> None:
            try:
                super().step()
            except RuntimeError as error:
                assert str(error) == "stumbled"
                self.seen.append("stumbled")

    class Expected(Goes):
        """A training without teraio. In the failed step it updates as many layers as the training with
        teraio."""

        def step(self) -> None:
            if self.number != 1 + (at - 1) // per_step:
                super().step()
                return
            stepped = 1 + (at - 1) % per_step
            parameters = [p for p in self.model.parameters() if p.grad is not None]
            gradients = [p.grad for p in parameters]
            for parameter in parameters[2 * stepped :]:
                parameter.grad = None
            self.optimizer.step()
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
            self.seen.append("stumbled")

    per_step = 6  # buckets per step: one for each of the six layers
    ours = Goes(adamw).run()
    assert stumbles.count == 4 * per_step + 1 + (at - 1) % per_step
    with pytest.MonkeyPatch.context() as disabled:
        disabled.setenv("TERAIO_DISABLE", "1")
        assert same(ours, Expected(adamw).run())


def test_lost_state_ends_the_host_step_with_an_error(
    beside: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside()
    view = host_step.HostTwins._view_if_only_on_host
    count = [0]

    def lost(self: Any, record: Any, tensor: Any) -> Any:
        count[0] += record.kind == "state"
        if count[0] == 9:
            raise TeraioError("lost on the way")
        return view(self, record, tensor)

    monkeypatch.setattr(host_step.HostTwins, "_view_if_only_on_host", lost)
    with pytest.raises(TeraioError, match="ended after 2 of 6 buckets: lost on the way"):
        Training(adamw).run()
    assert not any(record.pins for record in engine.ENGINE.residency.records.values())  # type: ignore[union-attr]


def test_host_option_without_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="on the CPU, tensors are in host memory already"):
        session.ensure_session(Settings.parse({"optimizer_step": "host"}))
    monkeypatch.setattr(session, "refuse_host_options_without_gpu", lambda options, kind: None)
    with pytest.raises(UnsupportedError, match="no host memory is used"):
        session.ensure_session(Settings.parse({"optimizer_step": "host"}))


# ---- tensors and optimizers that the host can step


def made() -> tuple[nn.Parameter, dict[str, Any]]:
    parameter = nn.Parameter(torch.randn(8, 4))
    parameter.grad = torch.randn(8, 4)
    return parameter, {"step": torch.ones(()), "exp_avg": torch.zeros(8, 4), "exp_avg_sq": torch.zeros(8, 4)}


def test_tensors_as_torch_makes_them_fit_a_fused_kernel() -> None:
    assert host_step._fits_fused_kernel(*made())


def negated() -> torch.Tensor:
    return torch.zeros(8, 4, dtype=torch.cfloat).conj().imag.contiguous()._neg_view()


STRANGE: dict[str, Callable[[nn.Parameter, dict[str, Any]], Any]] = {
    "no gradient": lambda p, s: setattr(p, "grad", None),
    "a sparse gradient": lambda p, s: setattr(p, "grad", torch.randn(8, 4).to_sparse()),
    "a gradient by columns": lambda p, s: setattr(p, "grad", torch.randn(4, 8).t()),
    "a weight by columns": lambda p, s: setattr(p, "data", torch.randn(4, 8).t()),
    "a weight of integers": lambda p, s: p.requires_grad_(False).__setattr__("data", torch.ones(8, 4).int()),
    "a state by columns": lambda p, s: s.update(exp_avg=torch.zeros(4, 8).t()),
    "a state of another type": lambda p, s: s.update(exp_avg=torch.zeros(8, 4, dtype=torch.float64)),
    "a state of another shape": lambda p, s: s.update(exp_avg=torch.zeros(32)),
    "a state that is negated": lambda p, s: s.update(
        exp_avg=torch.zeros(8, 4, dtype=torch.cfloat).conj().imag
    ),
    "a state of a class": lambda p, s: s.update(exp_avg=nn.Parameter(torch.zeros(8, 4))),
    "a state that is a list": lambda p, s: s.update(exp_avg=[torch.zeros(8, 4)]),
    "a counter that is a number": lambda p, s: s.update(step=1),
    "no states of size": lambda p, s: [s.pop("exp_avg"), s.pop("exp_avg_sq")],
}


@pytest.mark.parametrize("what", STRANGE)
def test_unusual_tensors_are_stepped_on_the_device(what: str) -> None:
    parameter, states = made()
    STRANGE[what](parameter, states)
    assert not host_step._fits_fused_kernel(parameter, states)


def test_tensors_that_share_bytes_are_stepped_on_the_device() -> None:
    parameter, states = made()
    assert host_step._has_separate_storages([parameter, parameter.grad, states["exp_avg"]])
    assert not host_step._has_separate_storages([parameter, parameter.detach()[1:]])


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "RMSprop": (torch.optim.RMSprop, "torch has fused CPU kernels"),
    "capturable": (lambda p: torch.optim.Adam(p, capturable=True), "capturable=True"),
    "differentiable": (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
    "betas": (
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), 0.99), foreach=False),
        "betas is a tensor",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsuitable_optimizer_is_stepped_on_the_device(what: str) -> None:
    make, reason = REFUSED[what]
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    try:
        optimizer = make([nn.Parameter(torch.zeros(2))])
    except ValueError:  # this version of torch refuses a tensor as this option
        optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), 0.99)
    assert reason in (host_step.reason_against_host_step(optimizer) or "")


# ---- the automatic choice between device and host


# The reserve takes 4 MiB of the budget, which leaves 1 MiB for tensors. The tensors take over 2 MiB.
LEFT_OPEN = {"optimizer_step": "auto", "memory": 5 * MIB}


def carry(monkeypatch: pytest.MonkeyPatch, rate: int, updated: int) -> None:
    """Set the rate of all links, and the rate of optimizer updates on the host, in bytes per second."""
    link = LinkRates("host", rate, rate, rate, rate, 10_000, 10_000)
    monkeypatch.setattr(RamDevice, "measure_host_link", lambda self, host, seconds, memory_bytes: link)
    monkeypatch.setattr(
        tiers,
        "_measure_link_once",
        lambda *about: replace(link, tier="ssd", evict_bytes_per_s=10**6, fetch_bytes_per_s=10**6),
    )
    monkeypatch.setattr(host_choice, "measure_update_bytes_per_s", lambda: updated)


@pytest.mark.parametrize(
    ("rate", "updated", "chosen"), [(10**7, 10**10, True), (10**10, 10**7, False)], ids=["link", "host"]
)
def test_faster_side_is_chosen_for_the_step(
    rate: int,
    updated: int,
    chosen: bool,
    beside: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = beside()
    carry(monkeypatch, rate, updated)
    with caplog.at_level(logging.INFO, "teraio"):
        assert same(LOOPS["small batches"]().run(**LEFT_OPEN), plain("small batches"))
    assert bool(steps) == chosen
    assert any("of the optimizer from now on" in record.getMessage() for record in caplog.records) == chosen


def test_optimizer_that_the_host_cannot_step_is_not_chosen(
    beside: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that no plan contains a step on the host. No warning appears, because the user did not choose the
    host."""
    steps = beside()
    carry(monkeypatch, 10**7, 10**10)
    planned: list[int] = []
    training = Training(
        lambda m: type("AdamW", (torch.optim.AdamW,), {})(m.parameters(), fused=True),
        lambda training: planned.append(teraio.stats()["planned_moves"]),
        batch=32,
    )
    with caplog.at_level(logging.WARNING, "teraio"):
        training.run(**LEFT_OPEN)
    assert not steps and not caplog.records
    assert planned[-1] > planned[-2] > 0


def test_step_returns_to_the_device_if_the_host_is_slower_than_expected(
    beside: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = beside()
    carry(monkeypatch, 10**7, 10**10)
    monkeypatch.setattr(host_choice.HostChoice, "_undo_if_slower", goes_back_from(10**6))
    with caplog.at_level(logging.INFO, "teraio"):
        assert same(LOOPS["small batches"]().run(**LEFT_OPEN), plain("small batches"))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "steps on the device again" in line]
    assert 0 < len(steps) < 6 * 4


def goes_back_from(device_ns: int) -> Any:
    goes_back = host_choice.HostChoice._undo_if_slower

    def seen(self: host_choice.HostChoice, plan: Any) -> bool:
        self.device_ns = device_ns
        return goes_back(self, plan)

    return seen


def test_measured_update_rate_of_the_host_is_plausible() -> None:
    assert 10**8 < host_choice.measure_update_bytes_per_s() < 10**13


def test_host_place_of_a_pinned_record_is_not_reused(root: Path) -> None:
    """Fill the host memory. A new host copy may take the place of another record only if that record is not
    pinned."""
    store = Store(root, 8 * MIB)
    mover = Residency(store, cpu.CpuDevice(), 8 * MIB, 0, Ram(MIB)).mover
    tensors = [torch.randn(MIB // 4) for _ in range(2)]
    one, other = (Record(t.untyped_storage(), str(at), "weight", True) for at, t in enumerate(tensors))
    mover.expect_host_copies({"1"})
    assert mover.reserve_host_place(one)
    one.pin()
    assert not mover.reserve_host_place(other)
    one.unpin()
    assert mover.reserve_host_place(other)
    assert one.place is None
    store.close()
