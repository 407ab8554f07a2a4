"""Tests without OR-Tools. Every planner still makes plans, and only one warning is logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import toys

from teraio.errors import PlanError
from teraio.formats.plan_check import check_plan_against_profile
from teraio.passes.planner import planners
from teraio.passes.planner.bound.bound import simple_bound_ns
from teraio.passes.planner.greedy import packing
from teraio.passes.planner.problem import solvers
from teraio.passes.planner.problem.problem import build_problem


@pytest.fixture
def _without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "ortools", None)
    solvers.is_ortools_installed.cache_clear()
    yield
    solvers.is_ortools_installed.cache_clear()


@pytest.mark.parametrize("name", ["auto", "greedy", "search", "ilp", "none", "teraio-paper"])
def test_every_planner_works_without_ortools(
    _without: None, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    profile, machine = toys.training_profile(), toys.machine(device=10_000, ssd=10_000, rate=400_000)
    caplog.set_level(logging.WARNING, "teraio")
    made = planners.plan(profile, machine, 1_500, planner=name, time_limit_s=1.0)
    again = planners.plan(profile, machine, 1_500, planner=name, time_limit_s=1.0)
    assert made.budget_bytes == again.budget_bytes == 1_500
    assert name == "none" or check_plan_against_profile(made, profile, machine).problems == ()
    assert made.predicted.bound_ns == simple_bound_ns(build_problem(profile, machine), 1_500)
    assert [record.message for record in caplog.records if "OR-Tools" in record.message] == [
        caplog.records[0].message
    ]
    assert "pip install ortools" in caplog.records[0].message


def test_error_for_full_tiers_suggests_ortools(_without: None) -> None:
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    with pytest.raises(PlanError, match="install ortools: its solver may find a way"):
        packing.pack_gaps_into_tiers(build_problem(profile, toys.machine(ssd=3)), 4)


def test_bound_is_tighter_with_ortools() -> None:
    profile, machine = toys.training_profile(), toys.machine(device=10_000, ssd=10_000, rate=400_000)
    assert solvers.is_ortools_installed()
    made = planners.plan(profile, machine, 1_500, planner="greedy", time_limit_s=1.0)
    assert made.predicted.bound_ns > simple_bound_ns(build_problem(profile, machine), 1_500)
