"""Tests of the lower bound. No plan is faster than the bound, a wrong relaxation is detected, and time limits
are kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import brute
import cpu_limit
import pytest
import toys
import tree

from teraio.errors import PlanError
from teraio.formats.machine import Link, Machine
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.profile import Profile
from teraio.passes.planner.bound import bound, certificate, relaxation
from teraio.passes.planner.bound.bound import lower_bound, pick_check_ticks, simple_bound_ns
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import Problem, build_problem
from teraio.passes.planner.simulate.simulate import step_ns

ROOM = 10**6
MACHINES = (
    toys.machine(device=ROOM, ssd=ROOM),
    toys.machine(device=ROOM, ssd=ROOM, latency_ns=700),
    toys.machine(device=ROOM, ssd=ROOM, rate=5 * toys.BYTE_PER_US),
    toys.machine(device=ROOM, ssd=ROOM, host=40),
)
SMALL = toys.machine(device=ROOM, ssd=30, host=40)


def sharing(machine: Machine, rate: int) -> Machine:
    """Return the machine with all its links on one bus. The bus moves `rate` bytes per second."""
    links = tuple(replace(link, shares="bus") for link in machine.links)
    return replace(machine, links=links, shared=(("bus", rate),))


# Two machines with a shared bandwidth. In the first machine, the two directions of one link share it. In the
# second machine, the links of two tiers share it.
SHARING = (
    sharing(MACHINES[2], 4 * toys.BYTE_PER_US),
    sharing(toys.machine(device=ROOM, ssd=ROOM, host=40), 5 * toys.BYTE_PER_US // 3),
)


def tight_budgets(problem: Problem) -> set[int]:
    """Return two tight budgets. One is the smallest possible budget. The other is the mean of the smallest
    budget and the budget at which all tensors fit."""
    floor, live = int(problem.floor.max()), int(problem.live.max())
    return {budget for budget in (floor, (floor + live) // 2) if budget < live}


# ---- bounds compared with sums by hand; kernels take 1 us, links move 1 byte per us ----


def test_bytes_fetched_every_step_take_link_time() -> None:
    # The budget of 4 bytes has room for only one of two clean weights of 4 bytes. Each weight is fetched once
    # per step, so one link needs 8 us. A plan needs 10 us, because each fetch must wait until the other
    # weight is evicted.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    problem, machine = build_problem(profile, MACHINES[0]), MACHINES[0]
    found = lower_bound(problem, machine, 4, time_limit_s=10)
    assert (found.step_ns, found.simple_ns) == (8_000, 4_000)
    assert sum(found.stalls_ns) == pytest.approx(6_000, abs=4)
    assert found.evicted_parts == pytest.approx((1.0, 1.0))
    assert plan(profile, machine, 4).predicted.step_ns == 10_000


def test_changed_weight_is_charged_for_write_and_read() -> None:
    # Kernel 0 changes `w` (4 bytes). Kernels 2 and 3 need the whole budget of 8 bytes, so `w` must be
    # evicted. The write takes 4 us, of which kernels 0 and 1 hide 2 us. The read takes 4 us, of which kernel
    # 3 hides 1 us. The stalls of 2 us and 3 us are added to 4 us of kernels.
    #
    # With a budget of 10 bytes, the relaxation evicts only 2 bytes of `w`. Kernels 0 and 1 hide the write.
    # The read takes 2 us, of which kernel 3 hides 1 us. The stall is therefore 1 us.
    profile = toys.profile([toys.weight("w", 4, (), (0,)), toys.activation("x", 8, 2, (3,))], 4)
    machine = toys.machine(device=ROOM)
    assert lower_bound(build_problem(profile, machine), machine, 8, time_limit_s=10).step_ns == 9_000
    assert lower_bound(build_problem(profile, machine), machine, 10, time_limit_s=10).step_ns == 5_000
    assert lower_bound(build_problem(profile, machine), machine, 12, time_limit_s=10).step_ns == 4_000


def test_relaxation_assigns_more_tensors_to_faster_tier() -> None:
    # Eight equal tensors are evicted to make room for `x`, and the links have 20 us for their transfers. The
    # host link moves 2 bytes per us, so the host receives about twice as many tensors as the SSD. If the
    # machine has only one slow tier, this tier receives all eight.
    tensors = [toys.activation(f"a{i}", 8, 0, (40,)) for i in range(8)]
    profile = toys.profile([*tensors, toys.activation("x", 64, 20, (21,))], 41)
    for host, expected in ((0, {0}), (ROOM, {0, 1})):
        machine = toys.machine(device=ROOM, ssd=ROOM, host=host)
        found = lower_bound(build_problem(profile, machine), machine, 64, time_limit_s=10)
        assert set(found.towards[:8]) == expected and found.towards[8] == -1
        assert found.towards.count(0) > found.towards.count(1)


def test_stall_in_small_part_of_step_raises_bound() -> None:
    # First, kernels make and use 200 activations of 8 bytes. Then 16 kernels each change another state of 40
    # bytes. When the first of the 16 kernels begins, 200 of these 640 bytes can be resident. The other 440
    # bytes must be fetched while the 16 kernels run for 16 us. The fetches take 22 us.
    tensors = [toys.activation(f"a{i}", 8, i, (399 - i,)) for i in range(200)]
    tensors += [toys.weight(f"s{i}", 40, (400 + i,), (400 + i,)) for i in range(16)]
    profile = toys.profile(tensors, 416)
    machine = toys.machine(device=ROOM, ssd=ROOM, rate=20 * toys.BYTE_PER_US)
    problem = build_problem(profile, machine)
    assert lower_bound(problem, machine, 200, time_limit_s=10, refined=False).step_ns == 416_000
    found = lower_bound(problem, machine, 200, time_limit_s=10)
    assert 422_000 <= found.step_ns <= plan(profile, machine, 200).predicted.step_ns
    assert sum(found.stalls_ns[390:]) + found.stalls_ns[0] > 5_000


def test_latency_counts_once_per_transfer() -> None:
    # Two weights are fetched per step, as in the first test. In this test each fetch has a latency of 700 ns.
    # If links share a bandwidth, the bound ignores latency. A bus that is half as fast as its links takes
    # twice the time.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    for machine, expected in (
        (MACHINES[1], 9_400),
        (sharing(MACHINES[1], toys.BYTE_PER_US), 8_000),
        (sharing(MACHINES[1], toys.BYTE_PER_US // 2), 16_000),
    ):
        assert lower_bound(build_problem(profile, machine), machine, 4, time_limit_s=10).step_ns == expected


def test_full_fast_tier_moves_traffic_to_slow_tier() -> None:
    # In each step 8 bytes are fetched. The host holds at most `room` of these bytes. The link of the host is
    # twice as fast as the link of the SSD.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    steps = []
    for room in (0, 2, 4, 8):
        machine = toys.machine(device=ROOM, ssd=ROOM, host=room)
        steps.append(lower_bound(build_problem(profile, machine), machine, 4, time_limit_s=10).step_ns)
    assert steps[0] == 8_000
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 3_000  # the two links together move 3 bytes per us


def test_link_slowed_by_another_link_carries_less() -> None:
    # In each step 8 bytes are fetched: 2 from the host, which has room for only 2, and 6 from the SSD. While
    # both links move bytes, each gets half of the bus, which is 0.2 bytes per us. Alone, the SSD's link moves
    # 0.25 bytes per us. Both links move bytes for 10 us. Then the SSD's link moves its last 4 bytes in 16 us.
    # The sum is 26 us.
    #
    # The relaxation has separate rows. The row for the SSD's link alone gives 24 us, and the row for the bus
    # alone gives 20 us.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    machine = toys.machine(device=ROOM, ssd=ROOM, host=2, rate=toys.BYTE_PER_US // 4)
    bus = sharing(machine, toys.BYTE_PER_US * 2 // 5)
    assert lower_bound(build_problem(profile, machine), machine, 4, time_limit_s=10).step_ns == 24_000
    assert lower_bound(build_problem(profile, bus), bus, 4, time_limit_s=10).step_ns == 26_000


# ---- bounds compared with every plan of tiny problems ----


# For each of these seeds, the bound is above the kernels' time and equals the step time of some plan. If one
# of these bounds were too high by any amount, a test would fail.
MET = (
    *(2, 29, 94, 122, 233, 386, 409, 413, 446, 462, 484, 674, 854, 898, 917, 1010, 1045, 1132, 1204, 1414),
    *(1420, 1576, 1580, 1649, 2042, 2066, 2082, 2216),
)
Solved = list[tuple[Problem, Machine, int, int]]


@pytest.fixture(scope="module")
def solved() -> Solved:
    """Return rows of (problem, machine, budget, step time of the fastest plan), for tiny problems."""
    found = []
    for seed in (*range(40), *MET):
        machine = MACHINES[seed % len(MACHINES)]
        profile = toys.random_profile(seed, 7, 5)
        # For two seeds in three, kernels take no time, so that every transfer makes the step longer.
        if seed % 3:
            kernels = tuple(replace(kernel, duration_ns=0) for kernel in profile.kernels)
            profile = replace(profile, kernels=kernels)
        problem = build_problem(profile, machine)
        if not 10 < brute.ways(problem) < 1_000:
            continue
        for budget in sorted(tight_budgets(problem)):
            best = brute.best(problem, machine, budget)
            assert best is not None
            found.append((problem, machine, budget, best[0]))
    return found


def refuted(solved: Solved) -> int:
    """Return the number of bounds that exceed the step time of the fastest plan."""
    return sum(
        lower_bound(problem, machine, budget, time_limit_s=10).step_ns > best_ns
        for problem, machine, budget, best_ns in solved
    )


def test_no_plan_is_faster_than_bound(solved: Solved) -> None:
    assert refuted(solved) == 0
    met = sum(lower_bound(p, m, b, time_limit_s=10).step_ns == best_ns for p, m, b, best_ns in solved)
    assert met >= len(MET), "a bound that no plan meets proves nothing here"


Plant = Callable[[pytest.MonkeyPatch], None]


def slower_links(patch: pytest.MonkeyPatch) -> None:
    real = relaxation.transfer_ns
    patch.setattr(relaxation, "transfer_ns", lambda link, size: real(link, size) * 5 // 4)


def smaller_budget(patch: pytest.MonkeyPatch) -> None:
    real = relaxation.build_relaxation

    def relax(
        problem: Problem, shared: Mapping[str, int], budget: int, checks: Sequence[int], again: object
    ) -> relaxation.Relaxation:
        return real(problem, shared, max(int(problem.floor.max()), budget * 3 // 4), checks)

    patch.setattr(bound, "build_relaxation", relax)


def a_write_for_every_gap(patch: pytest.MonkeyPatch) -> None:
    def add_copied(self: relaxation.RelaxationBuilder, group: relaxation.VersionGroup) -> None:
        for index, gap in enumerate(group.gaps):
            members = tuple((gaps[index],) for gaps in group.members)
            self.add_single_gap_group(replace(group, gaps=(gap,), members=members), gap[0])

    patch.setattr(relaxation.RelaxationBuilder, "add_multi_gap_group", add_copied)


def one_lane_for_both_directions(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: charge evictions and fetches to one lane, as if they could not overlap."""
    real = relaxation.RelaxationBuilder._charge_link_time

    def occupy(
        self: relaxation.RelaxationBuilder,
        link: Link,
        interval: int,
        group: relaxation.VersionGroup,
        terms: relaxation.Terms,
    ) -> None:
        real(self, replace(link, source="both", target="both"), interval, group, terms)

    patch.setattr(relaxation.RelaxationBuilder, "_charge_link_time", occupy)


def bound_without_certificate(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: replace the certified bound by the plain sum of the solver's prices.

    The relaxation itself, from which the solver gets the prices, is correct.
    """
    patch.setattr(bound, "certified_stall_bound_ns", lambda rows, prices: int(sum(map(abs, prices))))


@pytest.mark.parametrize(
    "plant",
    [
        slower_links,
        smaller_budget,
        a_write_for_every_gap,
        one_lane_for_both_directions,
        bound_without_certificate,
    ],
)
def test_wrong_relaxation_exceeds_some_plan(
    plant: Plant, solved: Solved, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert refuted(solved) > 0


# ---- random instances ----


@pytest.mark.parametrize("block", range(2))
def test_planned_steps_are_not_shorter_than_bound(block: int) -> None:
    met = planned = 0
    for seed in range(block * 50, block * 50 + 50):
        machine = (*MACHINES, SMALL, *SHARING)[seed % 7]
        problem = build_problem(toys.random_profile(seed), machine)
        for budget in tight_budgets(problem):
            try:
                made = plan(problem.profile, machine, budget)
            except PlanError:
                assert machine is SMALL
                continue
            took_ns = step_ns(made, problem.profile, machine)
            assert made.predicted.bound_ns >= simple_bound_ns(problem, budget)
            assert made.predicted.bound_ns <= made.predicted.step_ns == took_ns
            met += made.predicted.bound_ns == took_ns
            planned += 1
    assert met > planned // 6


def fixed_checks(profile: Profile, machine: Machine, budget: int) -> int:
    """Return the bound of a relaxation that checks memory at fixed ticks only.

    The choice of the ticks does not depend on the budget or the bandwidth.
    """
    problem = build_problem(profile, machine)
    rows = relaxation.build_relaxation(
        problem, dict(machine.shared), budget, pick_check_ticks(problem, 12)
    ).rows
    solution = certificate.solve_relaxation(rows, 60.0)
    assert solution is not None
    return certificate.certified_stall_bound_ns(rows, solution.prices)


def test_more_memory_and_faster_links_never_raise_bound() -> None:
    profile, slow = toys.training_profile(), toys.BYTE_PER_US // 4
    live = int(build_problem(profile).live.max())
    machine = toys.machine(device=ROOM, ssd=ROOM, rate=slow)
    by_budget = [fixed_checks(profile, machine, live * share // 10) for share in range(3, 10)]
    assert all(a >= b - 1 for a, b in pairwise(by_budget))
    assert by_budget[0] > 2 * by_budget[-2] > 0
    rates = [slow * share // 4 for share in (1, 2, 3, 4, 8, 16)]
    machines = [toys.machine(device=ROOM, ssd=ROOM, rate=rate) for rate in rates]
    by_rate = [fixed_checks(profile, machine, live // 2) for machine in machines]
    assert all(a >= b - 1 for a, b in pairwise(by_rate))
    assert by_rate[0] > 2 * by_rate[2] > 0


def test_bound_from_any_prices_is_at_most_optimum() -> None:
    profile, random = toys.training_profile(), Random(0)
    machine = toys.machine(device=ROOM, ssd=ROOM, host=400, rate=toys.BYTE_PER_US // 8)
    problem = build_problem(profile, machine)
    rows = relaxation.build_relaxation(
        problem, {}, int(problem.live.max()) // 2, pick_check_ticks(problem, 12)
    ).rows
    solution = certificate.solve_relaxation(rows, 60.0)
    assert solution is not None
    best_ns = certificate.certified_stall_bound_ns(rows, solution.prices)
    optimum_ns = sum(solution.values[: rows.stalls])
    assert optimum_ns * (1 - 1e-6) - 10 <= best_ns <= optimum_ns * (1 + 1e-6) + 10
    reached = []
    for scale in (1e-9, 1e-3, 0.1, 3.0):
        for _ in range(20):
            disturbed = [price * (1 + scale * random.uniform(-1, 1)) for price in solution.prices]
            reached.append(certificate.certified_stall_bound_ns(rows, disturbed))
            assert reached[-1] <= best_ns + 1
    assert reached[0] > 0.999 * best_ns, "a small error of the prices costs little"
    for nonsense in (float("nan"), float("inf"), -1e30, 1e30):
        assert certificate.certified_stall_bound_ns(rows, [nonsense] * len(rows.low)) <= best_ns + 1


# ---- time limits, and missing solvers ----


def test_bound_keeps_time_limit() -> None:
    machine = toys.machine(device=10**12, ssd=10**14, rate=20 * 10**9)
    problem = build_problem(toys.llama_like(), machine)
    budget = int(problem.live.max()) // 3
    simple = simple_bound_ns(problem, budget)
    certificate.solve_relaxation(relaxation.Rows(0, 0), 1.0)  # load the solver before the time is measured
    for limit_s in (0.0, 0.2, 1.0):
        with cpu_limit.at_most(0.6, given_s=2 * limit_s):
            found = lower_bound(problem, machine, budget, time_limit_s=limit_s)
        assert found.step_ns >= found.simple_ns == simple
        assert limit_s or found.checks == ()
    found = lower_bound(problem, machine, budget, time_limit_s=10.0)
    assert found.step_ns > 1.2 * simple, "10 s are enough for a relaxation"


def test_failing_solver_leaves_simple_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortools.math_opt.python import mathopt

    def refuses(*args: object, **options: object) -> None:
        raise RuntimeError("INVALID_ARGUMENT")

    profile = toys.training_profile()
    problem = build_problem(profile, MACHINES[0])
    budget = int(problem.floor.max())
    made = plan(profile, MACHINES[0], budget, planner="greedy")
    assert made.predicted.bound_ns > simple_bound_ns(problem, budget)
    monkeypatch.setattr(mathopt, "solve", refuses)
    made = plan(profile, MACHINES[0], budget, planner="greedy")
    assert made.predicted.bound_ns == simple_bound_ns(problem, budget)
    assert check_plan_against_profile(made, profile, MACHINES[0]).feasible


def test_step_that_fits_loads_no_solver() -> None:
    code = (
        "import sys, toys; from teraio.passes.planner.planners import plan\n"
        "plan(toys.diamond(), toys.machine(device=16), {budget}); print('ortools' in sys.modules)"
    )
    for budget, expected in ((10, "False"), (8, "True")):
        command = [sys.executable, "-c", code.format(budget=budget)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tree.SUPPORT, check=False)
        assert (ran.returncode, ran.stdout.strip()) == (0, expected), ran.stderr
