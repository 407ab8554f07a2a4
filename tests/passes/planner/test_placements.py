"""Tests of the bound for all placements of updates: no plan beats it, wherever its updates run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product
from random import Random

import pytest
import toys

from teraio.formats.machine import Machine
from teraio.formats.profile import Profile
from teraio.formats.recompute import find_recompute_gaps, profile_with_recomputation
from teraio.formats.updates import Update, find_updates, profile_with_updates, weights_of
from teraio.formats.updates import find_backward_updates as in_backward
from teraio.passes.planner.bound import placements
from teraio.passes.planner.bound.bound import lower_bound
from teraio.passes.planner.bound.placements import lower_bound_of_placements_ns
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import build_problem, smallest_budget

MACHINES = (
    toys.machine(device=10**6, ssd=10**6, rate=2 * toys.BYTE_PER_US),
    toys.machine(device=10**6, ssd=10**6, rate=5 * toys.BYTE_PER_US, latency_ns=700),
    toys.machine(device=10**6, ssd=10**6, host=10**6),
)
Case = tuple[Profile, Machine, int]


def subsets(profile: Profile) -> Iterable[tuple[Update, ...]]:
    updates = find_updates(profile)
    return (chosen for count in range(len(updates) + 1) for chosen in combinations(updates, count))


def with_late(profile: Profile, updates: Iterable[Update]) -> Profile:
    return profile_with_updates(profile, [name for update in updates for name in update.weights])


def all_placements(profile: Profile) -> Iterable[Profile]:
    """Yield the step of each placement: each update at the end of the step, late or in the backward."""
    late, early = ({update.tick: update for update in find(profile)} for find in (find_updates, in_backward))
    ticks = sorted({*late, *early})
    for places in product(*([None, *(it[tick] for it in (late, early) if tick in it)] for tick in ticks)):
        chosen = [update for update in places if update is not None]
        names = [
            [n for update in chosen if update is it.get(update.tick) for n in update.weights]
            for it in (late, early)
        ]
        yield profile_with_updates(profile, *names)


def case(seed: int, in_calls: bool = False) -> Case:
    """Return a training with at most three layers, a machine, and a budget that every placement fits.

    If `in_calls` is True, updates may also run in the backward.
    """
    random, profile = Random(seed), toys.random_training(seed)
    if in_calls:
        profile = toys.in_three_calls(profile)
    us = random.choice((0, 20, 100, 300))
    kernels = tuple(
        replace(kernel, duration_ns=random.choice((0, us)) * toys.US) for kernel in profile.kernels
    )
    profile = replace(profile, kernels=kernels)
    floors = [smallest_budget(step) for step in all_placements(profile)]
    live = int(build_problem(profile).live.max())
    return profile, MACHINES[seed % 3], max(floors) + random.choice((0, 1, 2)) * (live - max(floors)) // 5


def small_cases(count: int) -> list[Case]:
    found = (case(seed) for seed in range(10**6) if seed % 5 < 3)
    return [next(it for it in found if find_updates(it[0])) for _ in range(count)]


def cases_in_calls(count: int) -> list[Case]:
    found = (case(seed, in_calls=True) for seed in range(10**6) if seed % 5 in (1, 2))
    return [next(it for it in found if in_backward(it[0])) for _ in range(count)]


@pytest.fixture(scope="module")
def solved() -> list[tuple[Case, int]]:
    """Return cases with the fastest plan that the exact planner finds for any placement."""
    found = []
    for profile, machine, budget in small_cases(12):
        steps = [
            plan(with_late(profile, chosen), machine, budget, planner="ilp", time_limit_s=5).predicted.step_ns
            for chosen in subsets(profile)
        ]
        found.append(((profile, machine, budget), min(steps)))
    return found


@pytest.fixture(scope="module")
def solved_in_calls() -> list[tuple[Case, int]]:
    """Return such cases, whose updates may also run in the backward."""
    found = []
    for profile, machine, budget in cases_in_calls(5):
        steps = [
            plan(step, machine, budget, planner="ilp", time_limit_s=5).predicted.step_ns
            for step in all_placements(profile)
        ]
        found.append(((profile, machine, budget), min(steps)))
    return found


def bounds(cases: Iterable[tuple[Case, int]], backward: bool = False) -> list[tuple[int, int]]:
    return [
        (lower_bound_of_placements_ns(*case_, (), 10.0, backward=backward), best_ns)
        for case_, best_ns in cases
    ]


def test_no_placement_beats_the_bound(solved: list[tuple[Case, int]]) -> None:
    found = bounds(solved)
    assert all(bound_ns <= best_ns for bound_ns, best_ns in found), found


def test_no_placement_in_the_backward_beats_the_bound(solved_in_calls: list[tuple[Case, int]]) -> None:
    found = bounds(solved_in_calls, backward=True)
    assert all(bound_ns <= best_ns for bound_ns, best_ns in found), found


@pytest.fixture(scope="module")
def larger() -> list[tuple[Case, int]]:
    """Return larger cases with the fastest of several plans, which have more and more late updates."""
    found = []
    for layers, forward_us, share in ((8, 350, 0.2), (12, 200, 0.4), (16, 20, 0.2), (16, 100, 0.2)):
        profile = toys.training_profile(layers)
        times = [forward_us * toys.US * (tick < 2 * layers) for tick in range(3 * layers)]
        kernels = tuple(
            replace(each, duration_ns=ns) for each, ns in zip(profile.kernels, times, strict=True)
        )
        profile, machine = replace(profile, kernels=kernels), toys.machine(device=10**6, ssd=10**6)
        floor, live = smallest_budget(profile), int(build_problem(profile).live.max())
        budget = floor + int(share * (live - floor))
        updates = find_updates(profile)
        steps = [
            plan(with_late(profile, updates[:count]), machine, budget, planner="search").predicted.step_ns
            for count in range(0, layers + 1, layers // 4)
        ]
        found.append(((profile, machine, budget), min(steps)))
    return found


@pytest.fixture(scope="module")
def in_calls(larger: list[tuple[Case, int]]) -> tuple[Case, int]:
    """Return a larger case with calls, and a plan with updates in the backward."""
    (profile, machine, budget), _ = larger[2]
    profile = toys.in_three_calls(profile)
    early = weights_of(in_backward(profile))
    late = [name for name in weights_of(find_updates(profile)) if name not in early]
    made = plan(profile_with_updates(profile, late, early), machine, budget, planner="search")
    return (profile, machine, budget), made.predicted.step_ns


def test_the_bound_with_updates_in_the_backward_is_near_the_best_placement(
    in_calls: tuple[Case, int],
) -> None:
    ((bound_ns, best_ns),) = bounds([in_calls], backward=True)
    assert 0.75 * best_ns <= bound_ns <= best_ns, (bound_ns, best_ns)
    assert all(other_ns > best_ns for other_ns, _ in bounds([in_calls]))  # of plans without such updates


def test_the_bound_is_near_the_best_placement(larger: list[tuple[Case, int]]) -> None:
    for bound_ns, best_ns in bounds(larger):
        assert 0.88 * best_ns <= bound_ns <= best_ns


def recomputable(layers: int, kernel_us: int) -> Profile:
    """Return a training with large activations, which can be recomputed."""
    profile = toys.training_profile(layers)
    kernels = tuple(
        replace(kernel, call=int(tick >= layers) + int(tick >= 2 * layers), duration_ns=kernel_us * toys.US)
        for tick, kernel in enumerate(profile.kernels)
    )
    tensors = tuple(
        replace(tensor, size_bytes=400, recompute_from=tensor.writes[:1])
        if tensor.kind == "activation"
        else tensor
        for tensor in profile.tensors
    )
    return replace(profile, kernels=kernels, tensors=tensors)


@pytest.fixture(scope="module")
def recomputed() -> tuple[Case, int]:
    """Return a case with the fastest plan for any placement and any recomputed tensors."""
    profile, machine = recomputable(layers=4, kernel_us=10), MACHINES[0]
    names = [profile.tensors[index].name for index in find_recompute_gaps(profile)]
    steps = [
        profile_with_recomputation(with_late(profile, late), names[:count])
        for late in ((), find_updates(profile))
        for count in range(len(names) + 1)
    ]
    budget = max(smallest_budget(profile), *map(smallest_budget, steps))
    times = [plan(it, machine, budget, planner="ilp").predicted.step_ns for it in steps]
    return (profile, machine, budget), min(times)


def test_no_placement_with_recompute_beats_the_bound(recomputed: tuple[Case, int]) -> None:
    case_, best_ns = recomputed
    assert lower_bound_of_placements_ns(*case_, (), 10.0, recompute=True) <= best_ns
    # A plan that recomputes tensors is faster than any plan that does not.
    assert all(bound_ns > best_ns for bound_ns, best_ns in bounds([recomputed]))


def test_no_placement_in_the_backward_with_recompute_beats_the_bound(
    recomputed: tuple[Case, int],
) -> None:
    (profile, machine, budget), _ = recomputed
    names = [profile.tensors[index].name for index in find_recompute_gaps(profile)]
    steps = [profile_with_recomputation(profile, names[:count]) for count in range(len(names) + 1)]
    steps = [profile_with_updates(step, (), weights_of(in_backward(step))) for step in steps]
    fits = [step for step in steps if smallest_budget(step) <= budget]
    best_ns = min(plan(step, machine, budget, planner="ilp").predicted.step_ns for step in fits)
    found = lower_bound_of_placements_ns(profile, machine, budget, (), 10.0, recompute=True, backward=True)
    assert len(fits) > 1 and found <= best_ns


@pytest.mark.parametrize(("name", "made", "omitted"), [("a2", 2, {8}), ("a1", 1, set())])
def test_an_update_is_left_out_if_a_rerun_may_read_its_weight_later(
    name: str, made: int, omitted: set[int]
) -> None:
    """Tick 5 uses a rerun of the kernel at `made`. w2 is updated before tick 4, and w1 before tick 5."""
    profile = toys.in_three_calls(toys.training_profile(3))
    tensors = tuple(
        replace(t, reads=(5,), recompute_from=(made,)) if t.name == name else t for t in profile.tensors
    )
    profile = replace(profile, tensors=tensors)
    assert find_recompute_gaps(profile)
    assert placements._updates_read_by_reruns(profile, in_backward(profile)) == omitted


def test_a_plan_may_have_late_updates_and_recomputed_tensors(recomputed: tuple[Case, int]) -> None:
    (profile, machine, budget), _ = recomputed
    made = plan(profile, machine, budget, updates="auto", recompute=True, time_limit_s=3)
    assert made.predicted.bound_ns <= made.predicted.step_ns
    one = plan(profile, machine, budget, updates="step", recompute=True, time_limit_s=3)
    assert made.predicted.step_ns <= one.predicted.step_ns * 1.02


def test_a_step_without_updates_has_the_bound_of_its_order() -> None:
    profile, machine = toys.diamond(), toys.machine(rate=toys.BYTE_PER_US // 8)
    problem = build_problem(profile, machine)
    expected = lower_bound(problem, machine, 8, time_limit_s=10).step_ns
    assert lower_bound_of_placements_ns(profile, machine, 8, (), 10.0) == expected > profile.compute_ns


def more_live_bytes(patch: pytest.MonkeyPatch) -> None:
    real = placements._live_bytes
    patch.setattr(placements, "_live_bytes", lambda orders: [live * 5 // 4 for live in real(orders)])


def no_late_gaps(patch: pytest.MonkeyPatch) -> None:
    real = placements.versions_by_checks

    def of_step(problem: object, checks: object) -> Iterable[object]:
        tensors = problem.profile.tensors  # type: ignore[attr-defined]
        is_late = any(tensor.born is not None for tensor in tensors)
        return () if is_late else real(problem, checks)  # type: ignore[arg-type]

    patch.setattr(placements, "versions_by_checks", of_step)


def some_more_live_bytes(patch: pytest.MonkeyPatch) -> None:
    real = placements._live_bytes
    patch.setattr(placements, "_live_bytes", lambda orders: [live * 19 // 16 for live in real(orders)])


def more_life_at_other_places(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        placements, "_live_difference", lambda orders, at, _: tuple(int(at > 0) for _ in orders.checks[0])
    )


@pytest.mark.parametrize("plant", [some_more_live_bytes, more_life_at_other_places])
def test_a_wrong_bound_with_updates_in_the_backward_exceeds_some_plan(
    plant: object, in_calls: tuple[Case, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    assert all(bound_ns > best_ns for bound_ns, best_ns in bounds([in_calls], backward=True))


@pytest.mark.parametrize("plant", [more_live_bytes, no_late_gaps])
def test_a_wrong_bound_exceeds_some_plan(
    plant: object, larger: list[tuple[Case, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    assert any(bound_ns > best_ns for bound_ns, best_ns in bounds(larger))
