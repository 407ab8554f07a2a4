"""Tests of the choice of late updates: it is never far from the better of the two fixed placements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import toys

from teraio.errors import PlanError
from teraio.formats.plan import Plan
from teraio.formats.profile import Profile
from teraio.passes.planner import planners, update_choice
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import build_problem, smallest_budget

ALL = tuple(f"w{i}" for i in range(8))


def training(forward_us: int, update_us: int = 0) -> Profile:
    """Return a training of eight layers. A kernel of the forward or backward takes `forward_us`."""
    profile = toys.training_profile(layers=8)
    times = [forward_us if tick < 16 else update_us for tick in range(24)]
    kernels = tuple(
        replace(k, duration_ns=us * toys.US) for k, us in zip(profile.kernels, times, strict=True)
    )
    return replace(profile, kernels=kernels)


def planned(profile: Profile, updates: str, rate: int = 1, share: float = 0.2) -> Plan:
    machine = toys.machine(device=10**6, ssd=10**6, rate=rate * toys.BYTE_PER_US)
    floor, live = smallest_budget(profile), int(build_problem(profile).live.max())
    budget = floor + int(share * (live - floor))
    return plan(profile, machine, budget, planner="search", updates=updates, time_limit_s=2)


def test_all_updates_are_late_if_the_forward_hides_their_transfers() -> None:
    made = {updates: planned(training(700), updates) for updates in ("step", "late", "auto")}
    assert set(made["auto"].late) == set(made["late"].late) == set(ALL) and made["step"].late == ()
    assert made["auto"].predicted.step_ns * 1.1 < made["step"].predicted.step_ns


def test_no_update_is_late_if_the_step_hides_all_transfers() -> None:
    assert planned(training(9_000, 9_000), "auto").late == ()


@pytest.mark.parametrize("forward_us", [1, 100, 350])
def test_the_choice_is_close_to_the_better_placement(forward_us: int) -> None:
    """Make links busier step by step. These steps have 24 kernels, so a single wait is some percent."""
    profile = training(forward_us)
    step_ns = {it: planned(profile, it, 1, 0.4).predicted.step_ns for it in ("step", "late", "auto")}
    assert step_ns["auto"] <= 1.05 * min(step_ns["step"], step_ns["late"]), step_ns


def test_some_updates_are_late_if_links_are_busy() -> None:
    machine = toys.machine(device=10**6, ssd=10**6)
    chosen = set()
    for forward_us in (50, 100, 150, 200):
        profile = training(forward_us)
        chosen.add(len(update_choice.choose_late_updates(profile, machine, 1_700, (), 60.0)))
    assert chosen - {0, 8}, chosen


def test_the_choice_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Profile] = []
    real = update_choice._quick_step_and_bound_ns

    def slow(profile: Profile, *given: object) -> tuple[int, int]:
        tried.append(profile)
        return real(profile, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(update_choice, "_quick_step_and_bound_ns", slow)
    machine = toys.machine(device=10**6, ssd=10**6)
    profile = training(100)
    update_choice.choose_late_updates(profile, machine, smallest_budget(profile), (), 0.0)
    assert len(tried) == 1
    update_choice.choose_late_updates(profile, machine, smallest_budget(profile), (), 60.0)
    assert len(tried) > 5


def in_calls(forward_us: int) -> Profile:
    return toys.in_three_calls(training(forward_us))


def test_updates_run_in_the_backward_if_links_are_busy() -> None:
    made = {it: planned(in_calls(100), it, 1, 0.4) for it in ("auto", "backward")}
    assert set(made["backward"].backward) == set(ALL[1:]) and made["auto"].backward == ()
    assert made["backward"].predicted.step_ns < made["auto"].predicted.step_ns
    assert made["backward"].predicted.bound_ns <= made["auto"].predicted.bound_ns


def test_no_update_moves_if_all_tensors_fit() -> None:
    made = planned(in_calls(100), "backward", share=1.0)
    assert (made.late, made.backward) == ((), ())


def test_updates_are_late_if_none_can_run_in_the_backward() -> None:
    given = training(700), toys.machine(device=10**6, ssd=10**6), smallest_budget(training(700)) + 400
    late, backward = planners.updates_to_place(*given, time_limit_s=60)
    assert backward == () and late == planners.updates_to_run_late(*given, time_limit_s=60) != ()


def test_the_choice_is_that_of_the_plan() -> None:
    machine, profile = toys.machine(device=10**6, ssd=10**6), in_calls(100)
    made = plan(profile, machine, 1_700, updates="backward", time_limit_s=60)
    chosen = planners.updates_to_place(profile, machine, 1_700, time_limit_s=60)
    assert (made.late, made.backward) == chosen and chosen[1] != ()


def test_updates_run_at_the_step_if_the_backward_has_no_memory() -> None:
    """An update in the backward has the temporaries of its neighbours. They do not fit into the budget."""
    profile = in_calls(100)
    kernels = tuple(replace(k, workspace_bytes=4_000 * (8 <= i < 16)) for i, k in enumerate(profile.kernels))
    profile = replace(profile, kernels=kernels)
    machine, budget = toys.machine(device=10**6, ssd=10**6), smallest_budget(profile)
    made = plan(profile, machine, budget, updates="backward", time_limit_s=5)
    assert made.backward == ()
    # With a little more memory, they fit.
    assert plan(profile, machine, budget + 1_000, updates="backward", time_limit_s=5).backward != ()


def test_tensors_are_recomputed_and_updates_run_in_the_backward() -> None:
    profile = in_calls(100)
    tensors = tuple(
        replace(t, size_bytes=300, recompute_from=t.writes) if t.kind == "activation" else t
        for t in profile.tensors
    )
    profile, machine = replace(profile, tensors=tensors), toys.machine(device=10**6, ssd=10**6)
    asked = {"updates": "backward", "planner": "greedy", "time_limit_s": 20}
    made = plan(profile, machine, smallest_budget(profile) * 3 // 2, recompute=True, **asked)  # type: ignore[arg-type]
    assert made.recompute and made.backward
    assert made.predicted.bound_ns <= made.predicted.step_ns


@pytest.mark.parametrize("updates", ["step", "late", "auto", "backward"])
def test_a_budget_below_the_largest_kernel_is_refused(updates: str) -> None:
    profile = training(100)
    with pytest.raises(PlanError, match=r"step needs \d+ bytes at kernel"):
        plan(profile, toys.machine(device=10**6, ssd=10**6), smallest_budget(profile) - 1, updates=updates)
