"""The bound: no plan is faster, a wrong relaxation would be noticed, and it costs no more than it may."""

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
    """All links of the machine have a bandwidth in common."""
    links = tuple(replace(link, shares="bus") for link in machine.links)
    return replace(machine, links=links, shared=(("bus", rate),))


# Links in both directions, and of two tiers, of which one slows the other down.
SHARING = (
    sharing(MACHINES[2], 4 * toys.BYTE_PER_US),
    sharing(toys.machine(device=ROOM, ssd=ROOM, host=40), 5 * toys.BYTE_PER_US // 3),
)


def tight_budgets(problem: Problem) -> set[int]:
    """The smallest there is, and one halfway to where everything fits."""
    floor, live = int(problem.floor.max()), int(problem.live.max())
    return {budget for budget in (floor, (floor + live) // 2) if budget < live}


# ---- by hand: kernels of 1 us, links of 1 byte per us ----


def test_what_must_come_back_every_step_takes_its_time() -> None:
    # Two clean weights of 4 bytes under 4 bytes: each is fetched once a step, 8 us on one link, whatever the
    # kernels do in between. A plan needs 10 us, because a whole weight is fetched when the other has gone.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    problem, machine = build_problem(profile, MACHINES[0]), MACHINES[0]
    found = lower_bound(problem, machine, 4, time_limit_s=10)
    assert (found.step_ns, found.simple_ns) == (8_000, 4_000)
    assert sum(found.stalls_ns) == pytest.approx(6_000, abs=4)
    assert found.away == pytest.approx((1.0, 1.0))
    assert plan(profile, machine, 4).predicted.step_ns == 10_000


def test_a_written_weight_is_written_and_read() -> None:
    # w (4 bytes) is changed by kernel 0; kernels 2 and 3 need all of the budget. Writing takes 4 us, with the
    # time from the start of 0 to that of 2; reading takes 4 us, with that from the start of 3 to the step's
    # end: 2 and 1 us of kernels, so 2 + 3 us of stall on top of 4 of kernels. With 10 bytes a fluid sends 2
    # bytes away: writing has its 2 us, reading lacks 1.
    profile = toys.profile([toys.weight("w", 4, (), (0,)), toys.activation("x", 8, 2, (3,))], 4)
    machine = toys.machine(device=ROOM)
    assert lower_bound(build_problem(profile, machine), machine, 8, time_limit_s=10).step_ns == 9_000
    assert lower_bound(build_problem(profile, machine), machine, 10, time_limit_s=10).step_ns == 5_000
    assert lower_bound(build_problem(profile, machine), machine, 12, time_limit_s=10).step_ns == 4_000


def test_the_relaxation_says_to_which_tier() -> None:
    # Eight alike are away for x, and the links have 20 us for them: the host (2 bytes per us) takes about
    # twice as many as the SSD. Where there is one tier, it takes all.
    tensors = [toys.activation(f"a{i}", 8, 0, (40,)) for i in range(8)]
    profile = toys.profile([*tensors, toys.activation("x", 64, 20, (21,))], 41)
    for host, expected in ((0, {0}), (ROOM, {0, 1})):
        machine = toys.machine(device=ROOM, ssd=ROOM, host=host)
        found = lower_bound(build_problem(profile, machine), machine, 64, time_limit_s=10)
        assert set(found.towards[:8]) == expected and found.towards[8] == -1
        assert found.towards.count(0) > found.towards.count(1)


def test_a_wait_in_a_small_part_of_the_step_is_seen() -> None:
    # 200 activations of 8 bytes come and go, then 16 kernels change a state of 40 bytes each. Of those 200
    # bytes can be there when the first begins: 440 come in 16 us, which takes 22.
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
    # As above with two weights and 700 ns more for each of the two fetches of a step; where the links share a
    # bandwidth latency is left out, and a bus half as fast as its links takes twice the time.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    for machine, expected in (
        (MACHINES[1], 9_400),
        (sharing(MACHINES[1], toys.BYTE_PER_US), 8_000),
        (sharing(MACHINES[1], toys.BYTE_PER_US // 2), 16_000),
    ):
        assert lower_bound(build_problem(profile, machine), machine, 4, time_limit_s=10).step_ns == expected


def test_a_full_tier_pushes_traffic_to_the_slow_one() -> None:
    # Of the 8 bytes that come back per step the host, twice as fast, holds at most `room` of the 4 + 4.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    steps = []
    for room in (0, 2, 4, 8):
        machine = toys.machine(device=ROOM, ssd=ROOM, host=room)
        steps.append(lower_bound(build_problem(profile, machine), machine, 4, time_limit_s=10).step_ns)
    assert steps[0] == 8_000
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 3_000  # both links together carry 3 bytes per us


def test_a_link_that_another_one_slows_down_carries_less() -> None:
    # 8 bytes come back per step, 2 of them from the host, which has room for no more. While both links move
    # bytes each has half of the bus, 0.2 bytes per us, and the SSD's alone has 0.25: 10 us together, and 16
    # for the 4 bytes that the SSD has left. That link alone would say 24, the bus 20.
    profile = toys.profile([toys.weight("a", 4, (0,)), toys.weight("b", 4, (1,))], 2)
    machine = toys.machine(device=ROOM, ssd=ROOM, host=2, rate=toys.BYTE_PER_US // 4)
    bus = sharing(machine, toys.BYTE_PER_US * 2 // 5)
    assert lower_bound(build_problem(profile, machine), machine, 4, time_limit_s=10).step_ns == 24_000
    assert lower_bound(build_problem(profile, bus), bus, 4, time_limit_s=10).step_ns == 26_000


# ---- against every plan of tiny problems ----


# Seeds whose bound is met by a plan and is more than the kernels take: a wrong one has nowhere to hide.
MET = (
    *(2, 29, 94, 122, 233, 386, 409, 413, 446, 462, 484, 674, 854, 898, 917, 1010, 1045, 1132, 1204, 1414),
    *(1420, 1576, 1580, 1649, 2042, 2066, 2082, 2216),
)
Solved = list[tuple[Problem, Machine, int, int]]


@pytest.fixture(scope="module")
def solved() -> Solved:
    """Problems with all their plans tried: (problem, machine, budget, shortest step)."""
    found = []
    for seed in (*range(40), *MET):
        machine = MACHINES[seed % len(MACHINES)]
        profile = toys.random_profile(seed, 7, 5)
        if seed % 3:  # without kernels to hide behind, every transfer shows
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
    """How many bounds are above a plan."""
    return sum(
        lower_bound(problem, machine, budget, time_limit_s=10).step_ns > best_ns
        for problem, machine, budget, best_ns in solved
    )


def test_no_plan_at_all_is_faster(solved: Solved) -> None:
    assert refuted(solved) == 0
    met = sum(lower_bound(p, m, b, time_limit_s=10).step_ns == best_ns for p, m, b, best_ns in solved)
    assert met >= len(MET), "a bound that is never met says nothing"


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
    def add_copied(self: relaxation._Builder, group: relaxation.VersionGroup) -> None:
        for index, gap in enumerate(group.gaps):
            members = tuple((gaps[index],) for gaps in group.members)
            self.add_single_gap_group(replace(group, gaps=(gap,), members=members), gap[0])

    patch.setattr(relaxation._Builder, "add_multi_gap_group", add_copied)


def lanes_that_are_one(patch: pytest.MonkeyPatch) -> None:
    """As if what goes out and what comes back took turns."""
    real = relaxation._Builder._charge_link_time

    def occupy(
        self: relaxation._Builder,
        link: Link,
        interval: int,
        group: relaxation.VersionGroup,
        terms: relaxation.Terms,
    ) -> None:
        real(self, replace(link, source="both", target="both"), interval, group, terms)

    patch.setattr(relaxation._Builder, "_charge_link_time", occupy)


def prices_of_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    """Not the rows are wrong, but the certificate: it believes what the solver says about the sum."""
    patch.setattr(bound, "certified_stall_bound_ns", lambda rows, prices: int(sum(map(abs, prices))))


@pytest.mark.parametrize(
    "plant",
    [
        slower_links,
        smaller_budget,
        a_write_for_every_gap,
        lanes_that_are_one,
        prices_of_the_wrong_sign,
    ],
)
def test_a_wrong_relaxation_is_above_some_plan(
    plant: Plant, solved: Solved, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert refuted(solved) > 0


# ---- many instances ----


@pytest.mark.parametrize("block", range(2))
def test_no_planned_step_is_shorter(block: int) -> None:
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
            assert made.predicted.bound_ns <= made.predicted.step_ns
            if not machine.shared:  # the simulator lets links run freely that share a bandwidth
                assert made.predicted.bound_ns <= took_ns
            met += made.predicted.bound_ns == took_ns
            planned += 1
    assert met > planned // 6


def fixed_checks(profile: Profile, machine: Machine, budget: int) -> int:
    """The bound of one relaxation whose checks depend on neither budget nor bandwidth."""
    problem = build_problem(profile, machine)
    rows = relaxation.build_relaxation(
        problem, dict(machine.shared), budget, pick_check_ticks(problem, 12)
    ).rows
    solution = certificate.solve_relaxation(rows, 60.0)
    assert solution is not None
    return certificate.certified_stall_bound_ns(rows, solution.prices)


def test_more_memory_and_faster_links_never_raise_it() -> None:
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


def test_whatever_prices_a_solver_says_no_bound_is_above_the_optimum() -> None:
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
            said = [price * (1 + scale * random.uniform(-1, 1)) for price in solution.prices]
            reached.append(certificate.certified_stall_bound_ns(rows, said))
            assert reached[-1] <= best_ns + 1
    assert reached[0] > 0.999 * best_ns, "a price that is a little off costs a little"
    for nonsense in (float("nan"), float("inf"), -1e30, 1e30):
        assert certificate.certified_stall_bound_ns(rows, [nonsense] * len(rows.low)) <= best_ns + 1


# ---- what it may cost ----


def test_the_time_limit_is_kept() -> None:
    machine = toys.machine(device=10**12, ssd=10**14, rate=20 * 10**9)
    problem = build_problem(toys.llama_like(), machine)
    budget = int(problem.live.max()) // 3
    simple = simple_bound_ns(problem, budget)
    certificate.solve_relaxation(relaxation.Rows(0, 0), 1.0)  # the solver is loaded
    for limit_s in (0.0, 0.2, 1.0):
        with cpu_limit.at_most(0.6, given_s=2 * limit_s):
            found = lower_bound(problem, machine, budget, time_limit_s=limit_s)
        assert found.step_ns >= found.simple_ns == simple
        assert limit_s or found.checks == ()
    found = lower_bound(problem, machine, budget, time_limit_s=10.0)
    assert found.step_ns > 1.2 * simple, "the relaxation is reached"


def test_a_solver_that_fails_leaves_the_simple_bound(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_step_that_fits_loads_no_solver() -> None:
    code = (
        "import sys, toys; from teraio.passes.planner.planners import plan\n"
        "plan(toys.diamond(), toys.machine(device=16), {budget}); print('ortools' in sys.modules)"
    )
    for budget, expected in ((10, "False"), (8, "True")):
        command = [sys.executable, "-c", code.format(budget=budget)]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=tree.SUPPORT, check=False)
        assert (ran.returncode, ran.stdout.strip()) == (0, expected), ran.stderr
