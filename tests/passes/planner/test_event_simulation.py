"""Tests of the two simulators. The native recurrence over ticks and the simulation of events agree to the
nanosecond."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import generated_plans
import numpy as np
import pytest
import toys

from teraio import _native
from teraio.cli import main
from teraio.errors import PlanError
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Evict, Fetch, Home, Move, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.formats.timeline import Span, Stall
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import smallest_budget
from teraio.passes.planner.simulate import event_simulation
from teraio.passes.planner.simulate.simulate import (
    last_step_times,
    last_step_times_by_events,
    native_link_arrays,
    native_step_arrays,
    native_transfer_rows,
    simulate,
    step_ns,
    tick_entries_and_period,
    unshared_step_ns,
)
from teraio.units import fmt_ns

US = toys.US
CASES = 240


def instances(count: int = CASES) -> Iterator[tuple[int, Plan, Profile, Machine]]:
    """Yield random profiles with plans, for machines with slow and with fast links.

    Each plan is a random valid plan or a greedy plan. In every third profile, every second kernel has a
    duration of zero. Some tensors have zero bytes. Some plans have drops, and moves around the end of the
    step.
    """
    for seed in range(count):
        profile = toys.random_profile(seed)
        if seed % 3 == 0:
            kernels = [replace(k, duration_ns=k.duration_ns * (i % 2)) for i, k in enumerate(profile.kernels)]
            profile = replace(profile, kernels=tuple(kernels))
        machine = toys.machine(
            device=10_000,
            ssd=10_000,
            rate=(toys.BYTE_PER_US, 5 * toys.BYTE_PER_US, 333_333)[seed % 3],
            latency_ns=(0, 700, 1_301)[seed // 3 % 3],
            host=40 * (seed % 2),
        )
        floor = smallest_budget(profile)
        yield seed, plan(profile, machine, floor, planner="greedy"), profile, machine
        share = (0.3, 0.9)[seed % 2] if generated_plans.gaps(profile) else 0.0
        budget = max(generated_plans.working_set_bytes(profile))
        yield seed, generated_plans.random_plan(profile, budget, share, seed), profile, machine


# ---- compared with sums by hand ----


def hand(*moves: Move, homes: tuple[Home, ...] = ()) -> Plan:
    return Plan("", "hand", 8, homes, moves)


def test_simulated_events_equal_hand_calculation() -> None:
    # The eviction of `a` (4 bytes) runs 1..5 us. Tick 4 waits 1 us for the end of the eviction. The fetch of
    # `a` runs 7..11 us. Kernel 9 waits 1 us for the end of the fetch. The step takes 12 us.
    moves = (Evict("a", "ssd", free=4, trigger=1), Fetch("a", "ssd", trigger=6, ready=9))
    assert event_simulation.simulate_by_events(
        hand(*moves), toys.diamond(), toys.machine()
    ) == event_simulation.Outcome(12 * US, (12 * US,), peak_bytes=6)


def sharing(rate: int) -> Machine:
    """Return a machine with two links that share one bus. The bus moves `rate` bytes per second."""
    tiers = (Tier("device", 100), Tier("ssd", 100))
    links = (
        Link("device", "ssd", toys.BYTE_PER_US, 0, "bus"),
        Link("ssd", "device", toys.BYTE_PER_US, 0, "bus"),
    )
    return Machine("sharing", tiers, links, (("bus", rate),))


def test_links_that_share_divide_their_bandwidth() -> None:
    # The fetch of `w` (4 bytes) and the eviction of `a` (2 bytes) both start at 2 us.
    #
    # If the links share 2 bytes per us, each link has its full rate, and kernel 4 waits for `w` until 6 us.
    #
    # If the links share 1 byte per us, each link moves half a byte per us. The eviction of `a` then ends at 6
    # us. The last 2 bytes of `w` move alone until 8 us. Kernels 4..9 end at 14 us.
    tensors = [toys.weight("w", 4, (4,)), toys.activation("a", 2, 0, (9,))]
    profile = toys.profile(tensors, 10)
    moves = (
        Fetch("w", "ssd", 2, 4),
        Evict("w", "ssd", free=5),
        Evict("a", "ssd", free=8, trigger=2),
        Fetch("a", "ssd", 8, 9),
    )
    made = hand(*moves, homes=(Home("w", "ssd"),))
    assert check_plan_against_profile(made, profile, sharing(1)).feasible
    free, half = sharing(2 * toys.BYTE_PER_US), sharing(toys.BYTE_PER_US)
    # If the links share 2 bytes per us, kernel 9 waits 1 us for `a`, whose fetch runs 10..12 us.
    for machine, expected_ns in ((free, 13 * US), (half, 15 * US)):
        assert event_simulation.simulate_by_events(made, profile, machine).step_ns == expected_ns
        assert step_ns(made, profile, machine) == expected_ns
        assert unshared_step_ns(made, profile, machine) == 13 * US
    line = simulate(made, profile, half)
    assert line.step_ns == 15 * US
    assert line.stalls == (Stall(4, "w", 4 * US, "late read"), Stall(9, "a", 1 * US, "late read"))
    assert [span for span in line.spans if span.track != "compute"] == [
        Span("evict:ssd", "a", 2 * US, 6 * US, 2, "a"),
        Span("fetch:ssd", "w", 2 * US, 8 * US, 4, "w"),
        Span("fetch:ssd", "a", 12 * US, 14 * US, 2, "a"),
    ]


def test_transfer_in_flight_across_step_end_shares_with_next_step() -> None:
    # Each link alone moves 1 byte per us, and both links together also move 1 byte per us. The fetch of `w`
    # (4 bytes) is issued at tick 8, and moves alone for the last 2 us of each step. The eviction of `a` (2
    # bytes) is issued at tick 0 of the next step.
    #
    # From this tick 0 on, each transfer moves half a byte per us. Each has 2 bytes left, so both end 4 us
    # into the step.
    tensors = [toys.weight("w", 4, (5,)), toys.weight("a", 2, (6,), (9,))]
    profile = toys.profile(tensors, 10)
    moves = (
        Fetch("w", "ssd", 8, 15),
        Evict("w", "ssd", free=7),
        Evict("a", "ssd", free=5, trigger=0),
        Fetch("a", "ssd", 5, 6),
    )
    made = hand(*moves, homes=(Home("w", "ssd"),))
    assert check_plan_against_profile(made, profile, sharing(toys.BYTE_PER_US)).feasible
    line = simulate(made, profile, sharing(toys.BYTE_PER_US))
    fetch = next(span for span in line.spans if span.name == "w" and span.track == "fetch:ssd")
    assert (fetch.end_ns - line.step_ns, line.step_ns) == (4 * US, 11 * US)


def test_a_plan_is_predicted_as_events_do_where_links_share() -> None:
    profile, slow = toys.training_profile(), sharing(toys.BYTE_PER_US)
    slow = replace(slow, tiers=(Tier("device", 10_000), Tier("ssd", 10_000)))
    made = plan(profile, slow, 1_500, planner="greedy")
    assert (
        made.predicted.step_ns
        == event_simulation.simulate_by_events(made, profile, slow).step_ns
        > unshared_step_ns(made, profile, slow)
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (hand(), "10 bytes are on the device at kernel 'k4' .tick 4.; the plan's budget is 8"),
        (hand(Evict("a", "ssd", 4, 1)), "kernel 'k9' .tick 9. uses 'a', which is evicted"),
        (hand(Evict("a", "ssd", 3, 2), Fetch("a", "ssd", 3, 4)), "10 bytes are on the device"),
        (hand(Fetch("a", "ssd", 3, 4)), "a move needs 'a' to be evicted, but it is resident"),
        (hand(Evict("b", "ssd", 6, 5), Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 5, 9)), "10 bytes are on"),
    ],
)
def test_simulation_refuses_invalid_plan(broken: Plan, message: str) -> None:
    assert not check_plan_against_profile(broken, toys.diamond(), toys.machine()).feasible
    with pytest.raises(PlanError, match=message):
        event_simulation.simulate_by_events(broken, toys.diamond(), toys.machine())


def test_write_to_tensor_during_eviction_is_refused() -> None:
    profile = toys.profile([toys.weight("w", 4, (1,), (4,))], 10)
    torn = hand(Evict("w", "ssd", 5, 2), Fetch("w", "ssd", 6, 11))
    with pytest.raises(PlanError, match=r"kernel 'k4' \(tick 4\) writes 'w' during its eviction"):
        event_simulation.simulate_by_events(torn, profile, toys.machine())


# ---- random instances ----


def test_two_simulators_agree_to_the_nanosecond() -> None:
    moves = crossing = drops = several = 0
    for seed, made, profile, machine in instances():
        judged = event_simulation.simulate_by_events(made, profile, machine)
        entered_ns, period_ns = tick_entries_and_period(made, profile, machine)
        assert period_ns == judged.step_ns, seed
        ends_ns = [span.end_ns for span in judged.spans if span.track == "compute"]
        assert entered_ns == [0, *ends_ns[:-1]], seed
        assert_last_step_is_that_of_timeline(made, profile, machine)
        assert judged.peak_bytes <= made.budget_bytes
        rows = native_transfer_rows(made, profile, machine)
        moves += len(rows)
        crossing += sum(wait < issue for *_, issue, wait, _ in rows)
        drops += len(made.moves) - len(rows)
        several += len(set(judged.took_ns)) > 1
    # The instances contain enough transfers, transfers that cross the step's end, drops, and steps of varying
    # length.
    assert min(moves, 10 * crossing, 10 * drops, 20 * several) > 1_000


def assert_last_step_is_that_of_timeline(made: Plan, profile: Profile, machine: Machine) -> None:
    """Compare the times of ticks, transfers and stalls in the last steps of the two simulators."""
    native = last_step_times(made, profile, machine)
    assert native == last_step_times_by_events(made, profile, machine)


def test_native_recurrence_agrees_with_events_where_links_share() -> None:
    slower = several = 0
    for seed, made, profile, alone in instances():
        links = [
            replace(link, shares=("bus", "other")[seed % 4 == 3 and i > 1])
            for i, link in enumerate(alone.links)
        ]
        rate = alone.links[0].bandwidth_bytes_per_s
        shared = (("bus", rate * (5 + seed % 7) // 8), ("other", rate + seed))
        machine = replace(alone, links=tuple(links), shared=shared)
        judged = event_simulation.simulate_by_events(made, profile, machine)
        assert tick_entries_and_period(made, profile, machine)[1] == judged.step_ns, seed
        assert_last_step_is_that_of_timeline(made, profile, machine)
        slower += judged.step_ns > unshared_step_ns(made, profile, machine)
        several += len(set(judged.took_ns)) > 1
    assert slower > 100 and several > 20


def test_transfer_of_no_bytes_waits_in_its_queue() -> None:
    # The tensor `b` has no bytes, but its fetch must wait for the fetch of `a`, which runs 1..5 us. Kernel 3
    # needs `b`.
    tensors = [toys.weight("a", 4, (8,)), toys.weight("b", 0, (3,))]
    profile = toys.profile(tensors, 10)
    moves = (Evict("a", "ssd", 9), Evict("b", "ssd", 5), Fetch("a", "ssd", 1, 8), Fetch("b", "ssd", 1, 3))
    made = hand(*moves, homes=(Home("a", "ssd"), Home("b", "ssd")))
    assert check_plan_against_profile(made, profile, toys.machine()).feasible
    assert step_ns(made, profile, toys.machine()) == 12 * US
    assert event_simulation.simulate_by_events(made, profile, toys.machine()).step_ns == 12 * US
    assert step_ns(made, profile, sharing(toys.BYTE_PER_US)) == 12 * US


def test_simulators_repeat_after_same_number_of_steps() -> None:
    for seed, made, profile, machine in instances(40):
        judged = event_simulation.simulate_by_events(made, profile, machine)
        durations, *others = native_step_arrays(made, profile, machine)
        period, steps, entered = _native.settle(durations, *others)
        assert (period, steps) == (judged.step_ns, len(judged.took_ns)), seed
        assert (np.diff(entered) >= durations[:-1]).all()


# A transfer: lane, duration in ns, bytes, tick of issue, tick that waits, True for a fetch.
Row = tuple[int, int, int, int, int, bool]


def forget_crossing(rows: list[Row]) -> list[Row]:
    """Plant a bug: a step waits at its end for transfers that may continue into the next step."""
    last = max(max(row[3:5]) for row in rows)
    return [(*row[:4], last if row[4] < row[3] else row[4], row[5]) for row in rows]


def late_by_one(rows: list[Row]) -> list[Row]:
    return [(*row[:4], row[4] + 1 if row[3] < row[4] < 20 else row[4], row[5]) for row in rows]


def fetches_first(rows: list[Row]) -> list[Row]:
    return [(*row[:5], not row[5]) for row in rows]


@pytest.mark.parametrize("plant", [forget_crossing, late_by_one, fetches_first])
def test_planted_bug_changes_predicted_step(plant: object) -> None:
    assert callable(plant)
    seen = 0
    for _, made, profile, machine in instances(60):
        rows = native_transfer_rows(made, profile, machine)
        if not rows:
            continue
        ticks = len(profile.kernels)
        wrong = np.array([row for row in plant(rows) if max(row[3:5]) < ticks], np.int64).reshape(-1, 6)
        durations = np.array([kernel.duration_ns for kernel in profile.kernels], np.int64)
        judged = event_simulation.simulate_by_events(made, profile, machine).step_ns
        seen += _native.settle(durations, *native_link_arrays(machine), wrong)[0] != judged
    assert seen > 3


def test_jitter_costs_time_and_never_memory() -> None:
    """Vary the durations of kernels and transfers.

    The plan's budget still holds, because bytes are counted by ticks and not by times. If the budget were
    exceeded, the simulation would raise PlanError.
    """
    for share, by_step in ((0.1, False), (0.2, False), (0.2, True)):
        costs = []
        for seed, made, profile, machine in instances(60):
            plain = event_simulation.simulate_by_events(made, profile, machine).step_ns
            jitter = event_simulation.Jitter(share, seed, by_step)
            shaken = event_simulation.simulate_by_events(made, profile, machine, jitter=jitter, steps=6)
            assert shaken.peak_bytes <= made.budget_bytes
            costs.append(shaken.step_ns / plain if plain else 1.0)
        assert max(costs) <= 1 + share + 0.01
        assert 0.98 < sum(costs) / len(costs) < 1 + share


def test_same_seed_gives_same_jitter() -> None:
    _, made, profile, machine = next(case for case in instances(20) if len(case[1].moves) > 4)
    outcomes = {
        event_simulation.simulate_by_events(
            made, profile, machine, jitter=event_simulation.Jitter(0.2, seed), steps=6
        )
        for seed in (1, 1, 2)
    }
    assert len(outcomes) == 2


# ---- arrays that native code reads ----


LANE = (toys.BYTE_PER_US, 0, -1)


def settle(
    rows: list[tuple[int, ...]],
    durations: tuple[int, ...] = (1, 1),
    lanes: tuple[tuple[int, int, int], ...] = (LANE,),
    groups: tuple[int, ...] = (),
) -> int:
    """Return the time of a step with these transfers.

    Each row is a transfer: (lane, duration in ns, tick of issue, tick that waits, True for a fetch). A
    transfer has as many bytes as its duration has nanoseconds.
    """
    table = np.array([(*row[:2], max(row[1], 0), *row[2:]) for row in rows], np.int64).reshape(-1, 6)
    made = np.array(lanes, np.int64).reshape(-1, 3)
    return _native.settle(np.array(durations, np.int64), made, np.array(groups, np.int64), table)[0]


@pytest.mark.parametrize(
    ("lane", "group", "message"),
    [
        ((0, 0, -1), 5, "bandwidth below 1"),
        ((-(2**63), 0, -1), 5, "bandwidth below 1"),
        ((5, -1, -1), 5, "latency below 0"),
        ((5, 0, 1), 5, "group is out of range"),
        ((5, 0, -2), 5, "group is out of range"),
        ((5, 0, 0), 0, "a shared bandwidth below 1"),
    ],
)
def test_invalid_lane_raises_value_error(lane: tuple[int, int, int], group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settle([(0, 1, 0, 1, 1)], (1, 1), (lane,), (group,))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((1, 1, 0, 0, 0), "transfer 0: lane is 1"),
        ((-1, 1, 0, 0, 0), "transfer 0: lane is -1"),
        ((0, 1, 2, 0, 0), "transfer 0: issue is 2"),
        ((0, 1, 0, 2**40, 1), "an index is 1099511627776"),
        ((0, -5, 0, 0, 1), "transfer 0: ns is -5"),
    ],
)
def test_invalid_transfer_raises_value_error(row: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settle([row])


def test_overflowing_times_raise_natively_and_are_predicted_by_events() -> None:
    with pytest.raises(OverflowError, match="beyond 64 bits"):
        settle([(0, 2**62, 0, 1, 0)])
    with pytest.raises(OverflowError, match="beyond 64 bits"):
        settle([(0, 2**57, 0, 1, 0)] * 9)
    with pytest.raises(ValueError, match="duration is -1"):
        settle([], (-1,))
    assert settle([], ()) == settle([], (), ()) == 0
    # The transfer moves 2**50 bytes at 1 byte per second.
    with pytest.raises(OverflowError, match="beyond 64 bits"):
        settle([(0, 2**50, 0, 1, 0)], (1, 1), ((9, 0, 0), (9, 0, 0)), (1,))
    crawling = toys.machine(device=2**60, ssd=2**60, rate=1)
    tensors = [replace(t, size_bytes=t.size_bytes << 40) for t in toys.diamond().tensors]
    profile = toys.profile(tensors, 10)
    made = plan(profile, crawling, 8 << 40, planner="greedy")
    assert (
        made.predicted.step_ns == event_simulation.simulate_by_events(made, profile, crawling).step_ns > 2**62
    )


def test_simulate_command_shows_both_predictions_where_links_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, slow = toys.training_profile(), sharing(toys.BYTE_PER_US)
    slow = replace(slow, tiers=(Tier("device", 10_000), Tier("ssd", 10_000)))
    made = plan(profile, slow, 1_500, planner="greedy")
    made.write(tmp_path / "plan.json")
    profile.write(tmp_path / "profile.json")
    outputs = []
    for machine in (slow, replace(slow, shared=(("bus", 2 * toys.BYTE_PER_US),))):
        machine.write(tmp_path / "machine.json")
        files = [str(tmp_path / name) for name in ("plan.json", "profile.json")]
        assert main.main(["simulate", *files, "--machine", str(tmp_path / "machine.json")]) == 0
        outputs.append(capsys.readouterr().out)
    alone = fmt_ns(unshared_step_ns(made, profile, slow))
    assert fmt_ns(made.predicted.step_ns) in outputs[0] and alone in outputs[0] and "share" in outputs[0]
    # The two links together never exceed the bandwidth, so the output does not mention sharing.
    assert alone in outputs[1] and "share" not in outputs[1]
