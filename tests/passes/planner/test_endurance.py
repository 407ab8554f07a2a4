"""Tests of the cap on bytes written per day. The store delays writes beyond its allowance, and plans keep to
the cap."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import toys

from teraio.formats.plan import Evict, Fetch, Plan, Predicted
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.passes.planner.endurance import DAY_NS, ssd_bytes_written_per_step
from teraio.passes.planner.planners import plan
from teraio.runtime.store.store import Store
from teraio.runtime.store.write_rate import DAY_S, WriteRate

MACHINE = toys.machine(device=10**9, ssd=10**9, rate=10**6)  # every link moves a byte per microsecond


class Clock:
    def __init__(self) -> None:
        self.s = 0.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.s += seconds


def allowance(per_second: int, clock: Clock) -> WriteRate:
    return WriteRate(per_second * DAY_S, clock.now, clock.sleep)


def test_writes_beyond_allowance_of_an_hour_wait() -> None:
    clock = Clock()
    paced = allowance(10, clock)
    for _ in range(36):
        paced.wait_until_allowed(1_000)
    assert clock.slept == []
    paced.wait_until_allowed(1_000)
    assert clock.slept == [100.0]
    clock.s += 50
    paced.wait_until_allowed(1_000)
    assert clock.slept == [100.0, 50.0]


def test_writes_of_any_day_are_at_most_cap_plus_one_hour() -> None:
    clock = Clock()
    paced, random = allowance(10, clock), np.random.default_rng(1)
    written: list[tuple[float, int]] = []
    while clock.s < 3 * DAY_S:
        size = int(random.integers(1, 60_000))  # some writes are larger than the allowance of an hour
        paced.wait_until_allowed(size)
        written.append((clock.s, size))
        clock.s += float(random.integers(0, 2_000))
    most = max(sum(size for at, size in written if start <= at < start + DAY_S) for start, _ in written[::5])
    assert 10 * DAY_S * 0.9 < most <= 10 * (DAY_S + 3_600) + 60_000


def test_waits_are_logged_first_and_after_each_doubling(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    paced = allowance(10, clock)
    with caplog.at_level(logging.WARNING, "teraio"):
        for _ in range(36 + 15):
            paced.wait_until_allowed(1_000)
    assert len(caplog.records) == 4  # the four warnings come after 1, 3, 7 and 15 waits
    assert "max_write_per_day" in caplog.text


def test_store_waits_before_writes_only(tmp_path: Path) -> None:
    clock = Clock()
    store = Store(tmp_path, 64 * 2**20)
    bytes_ = np.arange(2**20, dtype=np.uint8)
    try:
        store.allowance = allowance(2**20 // 3_600, clock)
        extents = [store.reserve(2**20, f"t{i}") for i in range(3)]
        for extent in extents:
            store.write(extent, bytes_.ctypes.data, extent.name).wait()
        assert 7_000 < sum(clock.slept) < 7_300
        back = np.zeros_like(bytes_)
        for extent in extents:
            store.read(extent, back.ctypes.data, extent.name).wait()
        assert len(clock.slept) == 2
        assert (back == bytes_).all()
    finally:
        store.close()


def per_day(made: Plan, profile: Profile) -> int:
    return ssd_bytes_written_per_step(made, profile) * DAY_NS // made.predicted.step_ns


def test_capped_plan_is_stretched_and_writes_less() -> None:
    profile = toys.training_profile()
    freely = plan(profile, MACHINE, 1_200, planner="greedy")
    for share in (2, 10, 100):
        cap = per_day(freely, profile) // share
        made = plan(profile, MACHINE, 1_200, planner="greedy", write_per_day_bytes=cap)
        assert check_plan_against_profile(made, profile, MACHINE).feasible
        assert per_day(made, profile) <= cap
        assert ssd_bytes_written_per_step(made, profile) <= ssd_bytes_written_per_step(freely, profile)
        assert made.predicted.step_ns <= freely.predicted.step_ns * share
        assert made.predicted.bound_ns <= made.predicted.step_ns


def test_cap_above_planned_writes_changes_nothing() -> None:
    profile = toys.training_profile()
    freely = plan(profile, MACHINE, 1_200, planner="greedy", time_limit_s=200)
    cap = per_day(freely, profile) + 1
    assert (
        plan(profile, MACHINE, 1_200, planner="greedy", time_limit_s=200, write_per_day_bytes=cap) == freely
    )


def test_drop_counts_as_no_write() -> None:
    profile = toys.diamond()
    dropped = Plan("", "", 8, (), (Evict("a", "ssd", free=4), Fetch("a", "ssd", 6, 9)), (), Predicted(1))
    assert ssd_bytes_written_per_step(dropped, profile) == 0
