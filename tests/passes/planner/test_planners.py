"""Planners: every plan keeps its budget, none is refused where one exists, and predictions add up."""

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
from teraio.formats.profile import Profile
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


# ---- the simulator, by hand: kernels of 1 us, links of 1 byte per us ----


def test_stalls_are_what_arithmetic_says() -> None:
    # a is 4 bytes: its write runs from 1 to 5 us. Kernel 4 wants its room at 4 us and waits 1 us. So kernel 6
    # is entered at 7 us and the read runs from 7 to 11. Kernel 9 is entered at 10 us and waits 1 us: 12.
    line = simulate(hand(*FETCH_LATE), toys.diamond(), MACHINE)
    assert line.stalls == (Stall(4, "a", 1_000, "link busy"), Stall(9, "a", 1_000, "late read"))
    moved = [(s.track, s.start_ns, s.end_ns, s.bytes) for s in line.spans if s.track != "compute"]
    assert moved == [("evict:ssd", 1_000, 5_000, 4), ("fetch:ssd", 7_000, 11_000, 4)]
    assert step_ns(hand(*FETCH_LATE), toys.diamond(), MACHINE) == 12_000


def test_latency_occupies_the_lane() -> None:
    # Half a microsecond more for the write and for the read: both stalls grow by it.
    assert step_ns(hand(*FETCH_LATE), toys.diamond(), toys.machine(latency_ns=500)) == 13_000


def test_a_lane_serves_in_order_and_lanes_do_not_wait_for_each_other() -> None:
    # Two writes of 2 bytes issued at tick 1 (1 us): a 1..3, b 3..5. Both are free at 4, entered at 4 us: b
    # has 1 us to go. With b on the host link (2 bytes per us) it is done at 2 us, and nobody waits.
    profile = toys.profile([toys.activation("a", 2, 0, (9,)), toys.activation("b", 2, 0, (9,))], 10)
    back = (Fetch("a", "ssd", 5, 9), Fetch("b", "ssd", 5, 9))
    both = hand(Evict("a", "ssd", 4, 1), Evict("b", "ssd", 4, 1), *back)
    assert simulate(both, profile, MACHINE).stalls == (Stall(4, "b", 1_000, "link busy"),)
    apart = hand(Evict("a", "ssd", 4, 1), Evict("b", "host", 4, 1), back[0], Fetch("b", "host", 5, 9))
    assert simulate(apart, profile, toys.machine(host=8)).stalls == ()


def test_a_write_may_finish_in_the_next_step() -> None:
    # w (4 bytes) is written by kernel 9, the last. Its write is issued at tick 0 of the next step and runs
    # 0..4 us; the read is issued at tick 4 and runs 4..8, used at 8: nothing stalls and the step is 10 us.
    profile = toys.profile([toys.weight("w", 4, (8,), (9,))], 10)
    around = hand(Evict("w", "ssd", 4, 0), Fetch("w", "ssd", 4, 8))
    assert check_plan_against_profile(around, profile, MACHINE).feasible
    assert step_ns(around, profile, MACHINE) == 10_000
    # One tick less for each: 1 us of stall for each, 12 us in all.
    assert (
        step_ns(
            hand(Evict("w", "ssd", 3, 0), Fetch("w", "ssd", 4, 7)),
            toys.profile([toys.weight("w", 4, (7,), (9,))], 10),
            MACHINE,
        )
        == 12_000
    )


def test_a_fetch_may_be_in_flight_across_the_end_of_the_step() -> None:
    # w is used at 2 and 3. Its read is issued at tick 9 of the step before (9 us) and runs until 13 us;
    # kernel 2 would start at 12 us: 1 us of stall in each step.
    profile = toys.profile([toys.weight("w", 4, (2,), (3,))], 10)
    around = hand(Evict("w", "ssd", 8, 4), Fetch("w", "ssd", 9, 12), homes=(Home("w", "ssd"),))
    assert check_plan_against_profile(around, profile, MACHINE).feasible
    line = simulate(around, profile, MACHINE)
    assert line.stalls == (Stall(2, "w", 1_000, "late read"),)
    assert step_ns(around, profile, MACHINE) == 11_000


def test_counters_are_the_ledger() -> None:
    # a 4 until it is free at tick 4 (5 us), b 6 in ticks 4..5, a again from its trigger at tick 6 (7 us).
    line = simulate(hand(*FETCH_LATE), toys.diamond(), MACHINE)
    assert [(c.at_ns, c.bytes) for c in line.counters if c.kind == "activation"] == [
        (0, 4),
        (5_000, 6),
        (7_000, 4),
    ]


# ---- by hand: the planner ----


def test_what_fits_is_left_alone() -> None:
    made = plan(toys.diamond(), toys.machine(device=16), 10, fingerprint="f")
    assert (made.moves, made.homes, made.fingerprint, made.budget_bytes) == ((), (), "f", 10)
    assert made.predicted.step_ns == made.predicted.bound_ns == 10_000
    assert made.predicted.peak_bytes == 10


def test_the_diamond_is_cut_at_its_budget() -> None:
    # 10 bytes at tick 4 under a budget of 8: a must go before 4 and not come back before 6; 12 us is best.
    made = plan(toys.diamond(), MACHINE, 8)
    assert made.predicted.step_ns == 12_000
    assert made.moves == FETCH_LATE


def test_easy_transfers_are_hidden_completely() -> None:
    # Each layer computes 200 us per kernel and 400 bytes move in 0.4 us: memory halves, time stays.
    profile = toys.training_profile()
    made = plan(profile, ROOMY, all_resident(profile) // 2)
    assert len(made.moves) > 8
    assert made.predicted.step_ns == profile.compute_ns


def test_a_clean_weight_is_written_once_per_step() -> None:
    # w is used at 2, 6, 10, written at 14, and in each of its gaps something large passes.
    passing = [toys.activation(f"x{t}", 6, t, (t + 1,)) for t in (4, 8, 12, 16)]
    profile = toys.profile([toys.weight("w", 4, (2, 6, 10), (14,)), *passing], 20)
    made = plan(profile, MACHINE, 8)
    assert sum(isinstance(m, Fetch) for m in made.moves) == 4
    assert sum(isinstance(m, Evict) and m.trigger is not None for m in made.moves) == 1


def test_an_unused_tensor_lives_away_at_no_cost() -> None:
    profile = toys.profile([toys.weight("spare", 100, ()), toys.weight("w", 4, (1,))], 3)
    made = plan(profile, MACHINE, 8)
    assert (made.homes, made.moves, made.predicted.step_ns) == ((Home("spare", "ssd"),), (), 3_000)


def test_inputs_and_kept_tensors_never_move() -> None:
    profile = toys.random_profile(8)
    kept = [tensor.name for tensor in profile.tensors][::2]
    made = plan(profile, ROOMY, smallest_budget(profile, kept), keep=kept)
    stay = {t.name for t in profile.tensors if t.kind == "input"} | set(kept)
    assert stay.isdisjoint({move.tensor for move in made.moves} | {home.tensor for home in made.homes})


def test_a_full_tier_overflows_into_the_next() -> None:
    # Two tensors of 4 bytes must be away at once; the host tier is faster and holds one of them.
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
    with pytest.raises(PlanError, match=r"6 bytes must be away at kernel 'k8' \(tick 8\).*'ssd' 4 bytes"):
        plan(profile, toys.machine(ssd=4), 8)


def test_tiers_are_packed_where_filling_them_one_by_one_leaves_no_room() -> None:
    # All of 3, 3 and 4 bytes must be away for x. The host holds 4 and is faster, the SSD holds 6: only the 4
    # on the host leaves room for the others. With one byte less on the SSD nothing does.
    sizes = (("a", 3), ("b", 3), ("c", 4))
    tensors = [toys.activation(name, size, 0, (19,)) for name, size in sizes]
    profile = toys.profile([*tensors, toys.activation("x", 10, 8, (9,))], 20)
    made = plan(profile, toys.machine(device=10, ssd=6, host=4), 10)
    assert {move.tensor: move.to for move in made.moves if isinstance(move, Evict)}["c"] == "host"
    with pytest.raises(PlanError, match="10 bytes must be away"):
        plan(profile, toys.machine(device=10, ssd=5, host=5), 10)


def test_a_large_tensor_stays_where_a_few_bytes_are_too_many() -> None:
    # 4 bytes are too many at tick 8. Sending 1,000 away would take 2 ms, sending 4 takes 8 us, all hidden.
    tensors = [toys.weight("large", 1_000, (0,), (19,)), toys.activation("small", 4, 0, (19,))]
    profile = toys.profile([*tensors, toys.activation("x", 4, 8, (9,))], 20)
    made = plan(profile, toys.machine(device=10_000), 1_004, planner="greedy")
    assert {move.tensor for move in made.moves} == {"small"}
    assert made.predicted.step_ns == profile.compute_ns


def test_no_plan_means_a_certificate() -> None:
    profile = toys.profile(list(toys.diamond().tensors), 10, workspace={4: 1})
    assert smallest_budget(profile) == 7
    with pytest.raises(PlanError, match=r"step needs 7 bytes at kernel 'k4' \(tick 4\).*budget is 6"):
        plan(profile, MACHINE, 6)
    with pytest.raises(PlanError, match="there is none with links both ways"):
        plan(profile, Machine("alone", MACHINE.tiers[:1], ()), 8)
    with pytest.raises(PlanError, match="the budget is 5"):
        plan(profile, toys.machine(device=5), 8)  # the device is smaller than the budget
    with pytest.raises(OptionError, match=r"'greddy' is unknown; there are .*auto, .*greedy, .*none"):
        plan(profile, MACHINE, 8, planner="greddy")


def test_none_decides_nothing() -> None:
    made = plan(toys.diamond(), MACHINE, 8, planner="none")
    assert (made.planner, made.moves, made.homes) == ("none", (), ())
    assert (made.predicted.step_ns, made.predicted.bound_ns) == (0, 10_000)


# ---- many instances, one set of invariants ----


def lane_ns(made: Plan, profile: Profile, machine: Machine) -> int:
    """What the busiest lane carries in one step."""
    sizes, busy = {t.name: t.size_bytes for t in profile.tensors}, dict.fromkeys(machine.links, 0.0)
    for move in made.moves:
        for link in machine.links:
            ends = ("device", move.to) if isinstance(move, Evict) else (move.source, "device")
            if (link.source, link.target) == ends and not (isinstance(move, Evict) and move.trigger is None):
                busy[link] += link.latency_ns + sizes[move.tensor] * 1e9 / link.bandwidth_bytes_per_s
    return int(max(busy.values(), default=0))


def assert_steady(made: Plan, profile: Profile, machine: Machine, line: Timeline) -> None:
    """A step is its kernels and its stalls; lanes carry one transfer at a time."""
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
    # All ticks are entered at the same time, so nothing about a gap can be told from the clock.
    for seed in range(70):
        profile = toys.random_profile(seed)
        still = replace(profile, kernels=tuple(replace(kernel, duration_ns=0) for kernel in profile.kernels))
        assert_planned(still, MACHINES[2], (smallest_budget(still) + all_resident(still)) // 2)


@pytest.mark.parametrize("block", range(2))
def test_small_tiers_give_a_plan_or_a_certificate(block: int) -> None:
    refused = 0
    for seed in range(block * 100, block * 100 + 100):
        profile = toys.random_profile(seed)
        small = toys.machine(device=10_000, ssd=seed * 7 % 60, host=seed * 11 % 60)
        try:
            assert_planned(profile, small, (smallest_budget(profile) + all_resident(profile)) // 2)
        except PlanError as error:
            refused += 1
            assert "bytes must be away" in str(error)
    assert 0 < refused < 60


@pytest.mark.parametrize("block", range(2))
def test_a_plan_exists_exactly_from_the_floor_up(block: int) -> None:
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


def test_no_working_set_is_below_the_floor_of_any_checked_plan() -> None:
    # The floor is a certificate only if no plan can undercut it: the check agrees for the one that streams.
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
    """`plan` refuses what plan_check does not accept: a planner without a plan here makes none."""
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


def test_a_time_limit_still_gives_a_plan() -> None:
    profile = toys.training_profile()
    made = plan(profile, MACHINES[0], smallest_budget(profile), time_limit_s=0.0)
    assert check_plan_against_profile(made, profile, MACHINES[0]).feasible


def test_planning_takes_no_longer_than_a_better_plan_could_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """In so many steps: at most what greedy's first plans take beyond the simple bound."""
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
    for limit_s in (2.0, 10.0):  # of an idle machine; a busy one may need more for the relaxation alone
        given_s = limit_s * cpu_limit.slowness()
        with cpu_limit.at_most(2.0, given_s=given_s):
            made = plan(profile, machine, all_resident(profile) // 3, time_limit_s=given_s)
        if made.predicted.step_ns < 1.2 * max(made.predicted.bound_ns, lane_ns(made, profile, machine)):
            break
    assert len(made.moves) > 500
    assert made.predicted.step_ns < 1.2 * max(made.predicted.bound_ns, lane_ns(made, profile, machine))
