"""Tests of the CPU-time limits that other tests use."""

from __future__ import annotations

import time

import cpu_limit
import pytest


def burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_block_beyond_its_limit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_limit, "slowness", lambda: 1.0)
    with cpu_limit.at_most(0.2, given_s=0.2):
        burn(0.1)
    with pytest.raises(AssertionError, match=r"of CPU, not 0\.04 s \(0\.02 s on an idle machine, 0\.02 s"):
        with cpu_limit.at_most(0.02, given_s=0.02):
            burn(0.05)


def test_limit_on_a_slow_machine_extends_for_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_limit, "_fixed_work", lambda: 3 * cpu_limit.IDLE_SECONDS)
    assert cpu_limit.slowness() == pytest.approx(3.0)
    with cpu_limit.at_most(0.05):
        burn(0.1)
    with pytest.raises(AssertionError), cpu_limit.at_most(0.0, given_s=0.05):
        burn(0.1)
    monkeypatch.setattr(cpu_limit, "_fixed_work", lambda: cpu_limit.IDLE_SECONDS / 3)
    assert cpu_limit.slowness() == 1.0, "a fast machine keeps the limit of an idle one"
