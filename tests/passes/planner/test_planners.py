"""Tests of the planners. Plans keep to their budget, every possible budget gets a plan, and predictions are
consistent."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import cpu_limit
import pytest
import toys

from teraio.errors import OptionError, PlanError
from teraio.formats.machine import Machine
from teraio.formats.plan import Evict, Fetch, Home, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile, Tensor
from teraio.formats.timeline import Stall, Timeline
from teraio.passes.planner.auto import plan_by_planners_in_turn
from teraio.passes.planner.planners import PLANNERS, plan
from teraio.passes.planner.problem.problem import smallest_budget
from teraio.passes.planner.simulate.simulate import device_bytes_by_kind, simulate, step_ns

MACHINE = toys.machine()
ROOMY = toys.machine(device=10**12, ssd=10**12, rate=10**9, latency_ns=100)
FETCH_LATE = (Evict("a", "ssd", free=4, trigger=1), Fetch("a", "ssd", trigger=6, ready=9))


def hand(*moves: Evict | Fetch, homes: tuple[Home, ...] = ()) -> Plan:
    return Plan("", "hand", 8, homes, moves)


def all_resident(profile: Profile) -> int:
    return check_plan_against_profile(Plan("", "", 0), profile).peak_bytes


# ---- the simulator, compared with sums by hand; kernels take 1 us, links move 1 byte per us ----


def test_simulated_stalls_equal_hand_calculation() -> None:
    # The eviction of `a` (4 bytes) runs from 1 to 5 us. Kernel 4 needs the room of `a` at 4 us, and waits for
    # 1 us. Tick 6 therefore begins at 7 us, and the fetch of `a` runs from 7 to 11 us. Tick 9 begins at 10
    # us, and kernel 9 waits for 1 us. The step takes 12 us.
    line = simulate(hand(*FETCH_LATE), toys.diamond(), MACHINE)
    assert line.stalls == (Stall(4, "a", 1_000, "link busy"), Stall(9, "a", 1_000, "late read"))
    moved = [(s.track, s.start_ns, s.end_ns, s.bytes) for s in line.spans if s.track != "compute"]
    assert moved == [("evict:ssd", 1_000, 5_000, 4), ("fetch:ssd", 7_000, 11_000, 4)]
    assert step_ns(hand(*FETCH_LATE), toys.diamond(), MACHINE) == 12_000


def test_latency_occupies_the_lane() -> None:
    # With a latency of 500 ns, the eviction and the fetch each take 500 ns longer. Each of the two stalls is
    # also longer by 500 ns.
    assert step_ns(hand(*FETCH_LATE), toys.diamond(), toys.machine(latency_ns=500)) == 13_000


def test_lanes_serve_in_order_and_independently() -> None:
    # Two evictions of 2 bytes are issued at tick 1, which is at 1 us. The eviction of `a` runs 1..3 us, and
    # that of `b` runs 3..5 us. Both have `free` 4. Tick 4 begins at 4 us, so compute waits 1 us for `b`. On
    # the host link (2 bytes per us), the eviction of `b` ends at 2 us, and compute never waits.
    profile = toys.profile([toys.activation("a", 2, 0, (9,)), toys.activation("b", 2, 0, (9,))], 10)
    back = (Fetch("a", "ssd", 5, 9), Fetch("b", "ssd", 5, 9))
    both = hand(Evict("a", "ssd", 4, 1), Evict("b", "ssd", 4, 1), *back)
    assert simulate(both, profile, MACHINE).stalls == (Stall(4, "b", 1_000, "link busy"),)
    apart = hand(Evict("a", "ssd", 4, 1), Evict("b", "host", 4, 1), back[0], Fetch("b", "host", 5, 9))
    assert simulate(apart, profile, toys.machine(host=8)).stalls == ()


def test_write_of_last_kernel_finishes_in_next_step() -> None:
    # Kernel 9, the last one, writes `w` (4 bytes). The eviction of `w` is issued at tick 0 of the next step
    # and runs 0..4 us. The fetch is issued at tick 4 and runs 4..8 us. Kernel 8 then uses `w`. Compute never
    # waits, and the step takes 10 us.
    profile = toys.profile([toys.weight("w", 4, (8,), (9,))], 10)
    around = hand(Evict("w", "ssd", 4, 0), Fetch("w", "ssd", 4, 8))
    assert check_plan_against_profile(around, profile, MACHINE).feasible
    assert step_ns(around, profile, MACHINE) == 10_000
    # If the eviction and the fetch each have one tick less, each causes a stall of 1 us. The step takes 12
    # us.
    assert (
        step_ns(
            hand(Evict("w", "ssd", 3, 0), Fetch("w", "ssd", 4, 7)),
            toys.profile([toys.weight("w", 4, (7,), (9,))], 10),
            MACHINE,
        )
        == 12_000
    )


def test_fetch_in_flight_across_step_end_stalls_next_step() -> None:
    # Kernels 2 and 3 use `w`. The fetch of `w` is issued at tick 9 of the previous step (9 us) and runs until
    # 13 us. Kernel 2 could start at 12 us, so each step stalls for 1 us.
    profile = toys.profile([toys.weight("w", 4, (2,), (3,))], 10)
    around = hand(Evict("w", "ssd", 8, 4), Fetch("w", "ssd", 9, 12), homes=(Home("w", "ssd"),))
    assert check_plan_against_profile(around, profile, MACHINE).feasible
    line = simulate(around, profile, MACHINE)
    assert line.stalls == (Stall(2, "w", 1_000, "late read"),)
    assert step_ns(around, profile, MACHINE) == 11_000


def test_counters_equal_ledger() -> None:
    # The 4 bytes of `a` count until their `free` tick, which is tick 4 (5 us). They count again from tick 6
    # (7 us), which triggers the fetch. The 6 bytes of `b` count in ticks 4 and 5.
    line = simulate(hand(*FETCH_LATE), toys.diamond(), MACHINE)
    assert [(c.at_ns, c.bytes) for c in line.counters if c.kind == "activation"] == [
        (0, 4),
        (5_000, 6),
        (7_000, 4),
    ]


# ---- the planner, compared with plans by hand ----


def test_step_that_fits_gets_no_moves() -> None:
    made = plan(toys.diamond(), toys.machine(device=16), 10, fingerprint="f")
    assert (made.moves, made.homes, made.fingerprint, made.budget_bytes) == ((), (), "f", 10)
    assert made.predicted.step_ns == made.predicted.bound_ns == 10_000
    assert made.predicted.peak_bytes == 10


def test_diamond_over_budget_gets_best_moves() -> None:
    # At tick 4 the tensors have 10 bytes, and the budget is 8. The tensor `a` must therefore be evicted
    # before tick 4, and fetched from tick 6 on. The best step takes 12 us.
    made = plan(toys.diamond(), MACHINE, 8)
    assert made.predicted.step_ns == 12_000
    assert made.moves == FETCH_LATE


def test_fast_links_hide_all_transfers() -> None:
    # Each kernel takes 200 us, and a transfer of 400 bytes takes 0.4 us. Half of the memory is therefore
    # enough for a step without stalls.
    profile = toys.training_profile()
    made = plan(profile, ROOMY, all_resident(profile) // 2)
    assert len(made.moves) > 8
    assert made.predicted.step_ns == profile.compute_ns


def test_a_clean_weight_is_written_once_per_step() -> None:
    # Three kernels read the weight `w` (ticks 2, 6 and 10), and one writes it (tick 14). In each gap between
    # these uses, a large activation is alive.
    passing = [toys.activation(f"x{t}", 6, t, (t + 1,)) for t in (4, 8, 12, 16)]
    profile = toys.profile([toys.weight("w", 4, (2, 6, 10), (14,)), *passing], 20)
    made = plan(profile, MACHINE, 8)
    assert sum(isinstance(m, Fetch) for m in made.moves) == 4
    assert sum(isinstance(m, Evict) and m.trigger is not None for m in made.moves) == 1


def test_unused_tensor_has_slow_home_at_no_cost() -> None:
    profile = toys.profile([toys.weight("spare", 100, ()), toys.weight("w", 4, (1,))], 3)
    made = plan(profile, MACHINE, 8)
    assert (made.homes, made.moves, made.predicted.step_ns) == ((Home("spare", "ssd"),), (), 3_000)


def test_inputs_and_kept_tensors_never_move() -> None:
    profile = toys.random_profile(8)
    kept = [tensor.name for tensor in profile.tensors][::2]
    made = plan(profile, ROOMY, smallest_budget(profile, kept), keep=kept)
    fixed = {t.name for t in profile.tensors if t.kind == "input"} | set(kept)
    assert fixed.isdisjoint({move.tensor for move in made.moves} | {home.tensor for home in made.homes})


def test_a_full_tier_overflows_into_the_next() -> None:
    # Two tensors of 4 bytes must be evicted at the same time. The host tier is faster than the SSD, and has
    # room for one of the two.
    profile = toys.profile(
        [
            toys.activation("a", 4, 0, (19,)),
            toys.activation("b", 4, 1, (18,)),
            toys.activation("c", 6, 8, (11,)),
        ],
        20,
    )
    made = plan(profile, toys.machine(host=4), 8)
    assert {move.to for move in made.moves if isinstance(move, Evict)} == {"host", "ssd"}
    with pytest.raises(PlanError, match=r"6 B must be evicted at kernel 'k8' \(tick 8\).*'ssd' 4 B"):
        plan(profile, toys.machine(ssd=4), 8)


def test_tiers_are_packed_when_filling_one_by_one_fails() -> None:
    # Tensors of 3, 3 and 4 bytes must all be evicted to make room for `x`. The host tier is faster and holds
    # 4 bytes. The SSD holds 6 bytes. The tensors fit only if the tensor of 4 bytes is on the host. Two tiers
    # of 5 bytes are too small.
    sizes = (("a", 3), ("b", 3), ("c", 4))
    tensors = [toys.activation(name, size, 0, (19,)) for name, size in sizes]
    profile = toys.profile([*tensors, toys.activation("x", 10, 8, (9,))], 20)
    made = plan(profile, toys.machine(device=10, ssd=6, host=4), 10)
    assert {move.tensor: move.to for move in made.moves if isinstance(move, Evict)}["c"] == "host"
    with pytest.raises(PlanError, match="10 B must be evicted"):
        plan(profile, toys.machine(device=10, ssd=5, host=5), 10)


def test_a_copy_around_the_end_of_the_step_fills_its_tier() -> None:
    """The gradient `g` is evicted from tick 4 to tick 2 of the next step, and `x` from tick 0 to tick 3.

    The SSD has room for one of them.
    """
    grad = Tensor("g", "grad", 10, False, (2,), (4,), born=4)
    profile = toys.profile([grad, toys.activation("x", 10, 0, (3,))], 6, {1: 20})
    for planner in ("greedy", "search", "ilp", "auto"):
        with pytest.raises(PlanError, match="tiers"):
            plan(profile, toys.machine(device=100, ssd=10), 20, planner=planner)
        made = plan(profile, toys.machine(device=100, ssd=20), 20, planner=planner)
        assert made.predicted.peak_bytes == 20


def test_large_tensor_is_kept_resident_for_few_excess_bytes() -> None:
    # The tensors at tick 8 exceed the budget by 4 bytes. Evicting and fetching the tensor of 1,000 bytes
    # would take 2 ms. Moving the tensor of 4 bytes takes 8 us, which kernels hide.
    tensors = [toys.weight("large", 1_000, (0,), (19,)), toys.activation("small", 4, 0, (19,))]
    profile = toys.profile([*tensors, toys.activation("x", 4, 8, (9,))], 20)
    made = plan(profile, toys.machine(device=10_000), 1_004, planner="greedy")
    assert {move.tensor for move in made.moves} == {"small"}
    assert made.predicted.step_ns == profile.compute_ns


def test_impossible_plan_raises_error_with_reason() -> None:
    profile = toys.profile(list(toys.diamond().tensors), 10, workspace={4: 1})
    assert smallest_budget(profile) == 7
    with pytest.raises(PlanError, match=r"step needs 7 bytes at kernel 'k4' \(tick 4\).*budget is 6"):
        plan(profile, MACHINE, 6)
    with pytest.raises(PlanError, match="no tier has links in both directions"):
        plan(profile, Machine("alone", MACHINE.tiers[:1], ()), 8)
    with pytest.raises(PlanError, match="the budget is 5"):
        plan(profile, toys.machine(device=5), 8)  # the device has less memory than the budget
    with pytest.raises(OptionError, match=r"'greddy' is unknown; there are .*auto, .*greedy, .*none"):
        plan(profile, MACHINE, 8, planner="greddy")


def test_planner_none_makes_no_moves() -> None:
    made = plan(toys.diamond(), MACHINE, 8, planner="none")
    assert (made.planner, made.moves, made.homes) == ("none", (), ())
    assert (made.predicted.step_ns, made.predicted.bound_ns) == (0, 10_000)


# ---- random instances, which must all have the same invariants ----


def lane_ns(made: Plan, profile: Profile, machine: Machine) -> int:
    """Return the time that the busiest lane needs for the transfers of one step."""
    sizes, busy = {t.name: t.size_bytes for t in profile.tensors}, dict.fromkeys(machine.links, 0.0)
    for move in made.moves:
        for link in machine.links:
            ends = ("device", move.to) if isinstance(move, Evict) else (move.source, "device")
            if (link.source, link.target) == ends and not (isinstance(move, Evict) and move.trigger is None):
                busy[link] += link.latency_ns + sizes[move.tensor] * 1e9 / link.bandwidth_bytes_per_s
    return int(max(busy.values(), default=0))


def assert_steady(made: Plan, profile: Profile, machine: Machine, line: Timeline) -> None:
    """Assert that a step's time is the sum of its kernels and stalls, and that each lane carries one transfer
    at a time."""
    stalled = sum(stall.ns for stall in line.stalls)
    last = max((s.end_ns for s in line.spans if s.track == "compute"), default=0)
    assert last == profile.compute_ns + stalled
    for track in {span.track for span in line.spans}:
        spans = [span for span in line.spans if span.track == track]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(spans))
    rows = list(device_bytes_by_kind(made, profile).values())
    if profile.kernels:
        assert (
            max(sum(column) for column in zip(*rows))
            == check_plan_against_profile(made, profile, machine).peak_bytes
        )


def assert_planned(profile: Profile, machine: Machine, budget: int) -> Plan:
    made = plan(profile, machine, budget)
    verdict = check_plan_against_profile(made, profile, machine)
    assert verdict.problems == ()
    assert verdict.peak_bytes <= budget == made.budget_bytes
    assert made.predicted.peak_bytes == verdict.peak_bytes
    assert made.predicted.step_ns >= made.predicted.bound_ns >= profile.compute_ns
    assert made.predicted.step_ns >= lane_ns(made, profile, machine)
    assert_steady(made, profile, machine, simulate(made, profile, machine))
    return made


MACHINES = (
    toys.machine(device=10_000, ssd=10_000),
    toys.machine(device=10_000, ssd=10_000, latency_ns=700),
    toys.machine(device=10_000, ssd=10_000, rate=20 * toys.BYTE_PER_US),
    toys.machine(device=10_000, ssd=10_000, host=40),
)


def test_kernels_of_no_duration_do_not_break_the_ledger() -> None:
    # All kernels take no time, so all ticks begin at the same time and each gap has a length of zero.
    for seed in range(70):
        profile = toys.random_profile(seed)
        still = replace(profile, kernels=tuple(replace(kernel, duration_ns=0) for kernel in profile.kernels))
        assert_planned(still, MACHINES[2], (smallest_budget(still) + all_resident(still)) // 2)


@pytest.mark.parametrize("block", range(2))
def test_small_tiers_give_plan_or_error(block: int) -> None:
    refused = 0
    for seed in range(block * 100, block * 100 + 100):
        profile = toys.random_profile(seed)
        small = toys.machine(device=10_000, ssd=seed * 7 % 60, host=seed * 11 % 60)
        try:
            assert_planned(profile, small, (smallest_budget(profile) + all_resident(profile)) // 2)
        except PlanError as error:
            refused += 1
            assert "B must be evicted" in str(error)
    assert 0 < refused < 60


@pytest.mark.parametrize("block", range(2))
def test_plan_exists_exactly_from_floor_budget_up(block: int) -> None:
    moves = 0
    for seed in range(block * 70, block * 70 + 70):
        profile = toys.random_profile(seed)
        floor, everything = smallest_budget(profile), all_resident(profile)
        for share in (0.0, 0.3, 0.8, 1.0):
            budget = floor + int(share * (everything - floor))
            moves += len(assert_planned(profile, MACHINES[seed % len(MACHINES)], budget).moves)
        if floor > 0:
            with pytest.raises(PlanError, match=f"step needs {floor} bytes"):
                plan(profile, MACHINES[0], floor - 1)
    assert moves > 500


def test_plan_check_refuses_budget_below_peak_of_floor_plan() -> None:
    # Plan each step at the smallest possible budget. plan_check must refuse a budget below the peak of this
    # plan.
    for seed in range(60):
        profile = toys.random_profile(seed)
        floor = smallest_budget(profile)
        made = plan(profile, MACHINES[0], floor)
        assert check_plan_against_profile(made, profile).peak_bytes <= floor
        assert not check_plan_against_profile(
            replace(made, budget_bytes=check_plan_against_profile(made, profile).peak_bytes - 1), profile
        ).feasible


@pytest.mark.parametrize("planner", sorted({*PLANNERS} - {"none"}))
def test_each_planner_plans_random_steps(planner: str) -> None:
    """Check that no planned step is shorter than its bound. plan_check has already accepted each plan that
    `plan()` returns.

    A planner may find no plan for some of these steps.
    """
    made = 0
    for seed in (0, 4, 6, 17, 20):
        profile = toys.random_profile(seed)
        budget = (smallest_budget(profile) + 9 * all_resident(profile)) // 10
        machine = toys.machine(device=10_000, ssd=10_000, rate=20 * toys.BYTE_PER_US)
        with suppress(PlanError):
            it = plan(profile, machine, budget, planner=planner, time_limit_s=0.1)
            assert it.predicted is not None and it.predicted.step_ns >= it.predicted.bound_ns
            made += bool(it.moves)
    assert made


def test_the_same_seed_gives_the_same_plan() -> None:
    profile = toys.training_profile()
    plans = {plan(profile, MACHINES[0], 1_500, seed=3, time_limit_s=60) for _ in range(3)}
    assert len(plans) == 1


def test_zero_time_limit_still_gives_plan() -> None:
    profile = toys.training_profile()
    made = plan(profile, MACHINES[0], smallest_budget(profile), time_limit_s=0.0)
    assert check_plan_against_profile(made, profile, MACHINES[0]).feasible


def test_planning_takes_no_longer_than_a_better_plan_could_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy's first plan exceeds the simple bound by some time per step. A better plan saves at most this
    time per step.

    The time limit for planning is therefore at most this time multiplied by the number of steps.
    """
    given: list[float] = []

    def planner(*args: object, time_limit_s: float, **names: object) -> Plan:
        given.append(time_limit_s)
        return plan_by_planners_in_turn(*args, time_limit_s=time_limit_s, **names)  # type: ignore[arg-type]

    monkeypatch.setitem(PLANNERS, "auto", planner)
    profile, machine = toys.training_profile(), toys.machine(device=10**6, ssd=10**6, rate=10**5)
    first_ns = plan(profile, machine, 1200, planner="greedy").predicted.step_ns
    for steps in (10**9, 1):
        made = plan(profile, machine, 1200, steps=steps)
        assert check_plan_against_profile(made, profile, machine).feasible
    saves_s = (first_ns - profile.compute_ns) / 1e9
    assert 1 < given[0] <= 10
    assert given[1] <= saves_s < 0.1


def test_a_thousand_kernels_are_planned_in_seconds() -> None:
    profile = toys.llama_like()
    assert len(profile.kernels) > 900 and len(profile.tensors) > 1_300
    machine = toys.machine(device=10**12, ssd=10**14, rate=20 * 10**9)
    for limit_s in (2.0, 10.0):  # on a busy machine, the relaxation alone may need more than 2 s
        given_s = limit_s * cpu_limit.slowness()
        with cpu_limit.at_most(2.0, given_s=given_s):
            made = plan(profile, machine, all_resident(profile) // 3, time_limit_s=given_s)
        if made.predicted.step_ns < 1.2 * max(made.predicted.bound_ns, lane_ns(made, profile, machine)):
            break
    assert len(made.moves) > 500
    assert made.predicted.step_ns < 1.2 * max(made.predicted.bound_ns, lane_ns(made, profile, machine))
