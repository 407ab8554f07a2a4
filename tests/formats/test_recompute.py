"""Tests of recomputation. A step with recomputation computes the same values, its plans are valid, and its
lower bound holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from random import Random
from time import monotonic

import pytest
import toys

from teraio.cli import main
from teraio.errors import PlanError
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.recompute import (
    find_recompute_gaps,
    profile_with_recomputation,
    replay_with_copies,
)
from teraio.formats.timeline import Timeline
from teraio.passes.planner import joint_recompute, planners
from teraio.passes.planner.bound import recompute_terms as again_rows
from teraio.passes.planner.bound.bound import lower_bound
from teraio.passes.planner.bound.recompute_terms import RecomputeOption
from teraio.passes.planner.problem.problem import Problem, build_problem, smallest_budget
from teraio.passes.planner.simulate import event_simulation
from teraio.passes.synth.profiles import ProfileRequest, synth
from teraio.passes.synth.roofline import ProfileBuilder, Rates


@cache
def gpt() -> Profile:
    return synth("gpt2", ProfileRequest(batch=4, layers=2))


def network(seed: int) -> Profile:
    """Return the profile of a step with a random forward and a backward.

    The backward reads the inputs and outputs of the forward's kernels, in reverse order.
    """
    random = Random(seed)
    recorder = ProfileBuilder(Rates(10**9, 10**9, 1_000))
    recorder.forward.add(0)
    live = [recorder.add_tensor("x", "input", 1)]
    ran: list[tuple[list[int], list[int]]] = []
    for number in range(random.randint(3, 7)):
        weight = recorder.add_tensor(f"w{number}", "weight", random.choice((2, 5)), True)
        reads = random.sample(live, min(len(live), random.choice((1, 1, 2))))
        if live[-1] not in reads:
            reads.append(live[-1])
        made = [
            recorder.add_tensor(f"a{number}.{part}", "activation", random.choice((3, 8, 20)))
            for part in range(random.choice((1, 1, 2)))
        ]
        recorder.add_kernel(f"f{number}", [*reads, weight], made, flop=random.choice((0, 2_000, 40_000)))
        ran.append(([*reads, weight], made))
        live += made
    recorder.call, grad = 1, recorder.add_tensor("loss", "activation", 1)
    recorder.add_kernel("loss", [live[-1]], [grad])
    for number, (reads, made) in reversed(list(enumerate(ran))):
        saved = [tensor for tensor in (*reads, *made) if random.random() < 0.7]
        after = recorder.add_tensor(f"g{number}", "activation", random.choice((3, 8)))
        recorder.add_kernel(f"b{number}", [grad, *saved], [after], flop=2_000)
        grad = after
    return recorder.build_profile(f"network-{seed}")


def values_read(profile: Profile) -> dict[str, list[object]]:
    """Return, for each kernel name, a list of the values that the kernel reads in its first run and in its
    rerun.

    A value is identified by the kernel that computed it and by that kernel's inputs.
    """
    holds: dict[int, object] = {}
    for index, tensor in enumerate(profile.tensors):
        if tensor.persistent or tensor.kind == "input":
            holds[index] = tensor.name
    read: dict[str, list[object]] = {}
    for tick, kernel in enumerate(profile.kernels):
        inside = [(i, t) for i, t in enumerate(profile.tensors) if tick in t.reads]
        name = kernel.name.removesuffix(".again")
        seen = tuple(sorted((t.name.removesuffix(".again"), hash(holds[i])) for i, t in inside))
        read.setdefault(name, []).append(seen)
        for index, tensor in enumerate(profile.tensors):
            if tick in tensor.writes:
                holds[index] = (name, tensor.name.removesuffix(".again"), seen)
    return read


def subsets(profile: Profile, seed: int, count: int) -> list[tuple[str, ...]]:
    random, names = Random(seed), [profile.tensors[index].name for index in find_recompute_gaps(profile)]
    picked = [tuple(n for n in names if random.random() < share) for share in (0.2, 0.5, 0.8)[:count]]
    return [*picked, tuple(names)]


@pytest.mark.parametrize("seed", range(20))
def test_every_kernel_reads_the_same_values_and_reruns_at_most_once(seed: int) -> None:
    profile = network(seed)
    for names in subsets(profile, seed, 3):
        profile_with_recomputation(profile, names).validate()
        step, _ = replay_with_copies(profile, names)
        once, twice = values_read(profile), values_read(step)
        assert once.keys() == twice.keys()
        for kernel, reads in twice.items():
            assert set(reads) == set(once[kernel]) and len(reads) <= 2


def test_kernels_of_a_whole_model_read_the_same_values() -> None:
    for names in subsets(gpt(), 1, 2):
        once, twice = values_read(gpt()), values_read(replay_with_copies(gpt(), names)[0])
        assert {kernel: set(reads) for kernel, reads in once.items()} == {k: set(r) for k, r in twice.items()}


def closure_by_hand(profile: Profile, names: tuple[str, ...]) -> set[str]:
    """Return the names of the kernels that must run again to recompute the tensors `names`.

    The function goes through all uses of these tensors. For each use, a recursion finds the kernel that makes
    the tensor, and the kernels that make the dead inputs of this kernel.
    """
    possible = find_recompute_gaps(profile)
    chosen = {i: c for i, c in possible.items() if profile.tensors[i].name in names}
    alive: set[int] = set()
    ran: set[str] = set()

    def need(index: int, tick: int) -> None:
        tensor = profile.tensors[index]
        if tensor.persistent or tensor.kind == "input" or index in alive:
            return
        dead = max((*tensor.reads, *tensor.writes)) < tick
        if not dead and not (index in chosen and chosen[index].last < tick):
            return
        for source, other in enumerate(profile.tensors):
            if tensor.writes[0] in other.reads:
                need(source, tick)
        ran.add(profile.kernels[tensor.writes[0]].name)
        alive.update(i for i, t in enumerate(profile.tensors) if t.writes == tensor.writes and i in chosen)
        alive.add(index)

    for tick in range(len(profile.kernels)):
        for index, cut in chosen.items():
            if tick in profile.tensors[index].reads and tick >= cut.first:
                need(index, tick)
    return ran


@pytest.mark.parametrize("seed", range(20))
def test_reruns_match_a_closure_computed_by_hand(seed: int) -> None:
    profile = network(seed)
    for names in subsets(profile, seed + 100, 3):
        again = [
            k.name for k in profile_with_recomputation(profile, names).kernels if k.name.endswith(".again")
        ]
        assert sorted(again) == sorted(f"{name}.again" for name in closure_by_hand(profile, names))


def two_layers(last_read_of_b: int = 2) -> Profile:
    """Return a forward that makes a, b and c, and a backward that reads them. The kernel that makes b can run
    again, because it reads only a. In this table, W is a write and R is a read:

        tick   0   1   2 | 3   4   5
        a      W   R     |         R
        b          W   R |     R
        c              W | R
    """
    rows = tuple(Kernel(f"k{i}", i // 3, toys.US, 6 * (i == 3)) for i in range(6))
    a, c = toys.activation("a", 4, 0, (1, 5)), toys.activation("c", 1, 2, (3,))
    b = replace(toys.activation("b", 6, 1, (last_read_of_b, 4)), recompute_from=(1,))
    return Profile("two", 0, rows, (a, b, c))


def test_a_recomputed_tensor_has_no_bytes_between_forward_and_backward() -> None:
    step, _ = replay_with_copies(two_layers(), ["b"])
    assert [kernel.name for kernel in step.kernels] == ["k0", "k1", "k2", "k3", "k1.again", "k4", "k5"]
    tensors = {tensor.name: tensor for tensor in step.tensors}
    assert (tensors["b"].writes, tensors["b"].reads) == ((1,), (2,))
    assert (tensors["b.again"].writes, tensors["b.again"].reads) == ((4,), (5,))
    assert tensors["a"].reads == (1, 4, 6)
    assert step.kernels[4].call == 1
    # The recomputed copy of `b` cannot be evicted, so its bytes count as workspace.
    inside = profile_with_recomputation(two_layers(), ["b"])
    assert [kernel.workspace_bytes for kernel in inside.kernels] == [0, 0, 0, 6, 6, 6, 0]
    assert inside.tensors == step.tensors[:3]


def test_a_tensor_that_cannot_be_recomputed_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="'nobody': no tensor of that name in profile 'two'"):
        profile_with_recomputation(two_layers(), ["nobody"])
    with pytest.raises(PlanError, match=r"recompute of 'a' .* names no kernels"):
        profile_with_recomputation(two_layers(), ["a"])
    tensors = list(two_layers().tensors)
    # The tensor `a` is dead before the backward, so `b` cannot be recomputed.
    tensors[0] = toys.activation("a", 4, 0, (1,))
    with pytest.raises(PlanError, match=r"recompute of 'b' .* would read other bytes"):
        profile_with_recomputation(replace(two_layers(), tensors=tuple(tensors)), ["b"])
    # A kernel writes `w` after the kernel that makes `b` has read it. A rerun would read other values, so `b`
    # cannot be recomputed.
    weight = Tensor("w", "weight", 1, True, (1,), (2,))
    with pytest.raises(PlanError, match=r"recompute of 'b'"):
        profile_with_recomputation(replace(two_layers(), tensors=(*two_layers().tensors, weight)), ["b"])
    # A rerun of the kernel would change the state a second time.
    state = Tensor("s", "state", 1, True, (1,), (1,))
    with pytest.raises(PlanError, match=r"recompute of 'b'"):
        profile_with_recomputation(replace(two_layers(), tensors=(*two_layers().tensors, state)), ["b"])


def test_the_check_follows_a_plan_through_the_longer_step() -> None:
    """Check a plan for the step that recomputes b. The plan's ticks also count the kernel that runs again."""
    plan = Plan("", "hand", 11, recompute=("b",))
    # At tick 2, a, b and c are alive. At tick 3, a, c and the workspace are alive.
    assert check_plan_against_profile(plan, two_layers()).feasible
    less = check_plan_against_profile(replace(plan, budget_bytes=10), two_layers())
    assert not less.feasible and less.peak_bytes == 11
    assert check_plan_against_profile(replace(plan, recompute=()), two_layers()).peak_bytes == 17
    in_time = replace(plan, moves=(Evict("a", "ssd", 3, 2), Fetch("a", "ssd", 3, 4)))
    assert check_plan_against_profile(in_time, two_layers()).feasible
    late = replace(plan, moves=(Evict("a", "ssd", 3, 2), Fetch("a", "ssd", 5, 6)))
    assert (
        "'k1.again'): used by the kernel, but 'a' is evicted"
        in check_plan_against_profile(late, two_layers()).problems[0]
    )
    unknown = check_plan_against_profile(replace(plan, recompute=("a",)), two_layers()).problems
    assert "recompute of 'a' is not possible" in unknown[0]


def test_two_simulators_agree_on_a_step_with_recompute() -> None:
    machine = toys.machine(device=10**9, rate=10 * toys.BYTE_PER_US)
    for seed in range(6):
        profile = network(seed)
        for names in subsets(profile, seed, 1):
            step = profile_with_recomputation(profile, names)
            budget = max(smallest_budget(step), 30)
            plan = planners.plan(step, machine, budget, planner="greedy", time_limit_s=5.0)
            assert event_simulation.simulate_by_events(plan, step, machine).step_ns == plan.predicted.step_ns


def shortfall(seed: int, candidates_of: Callable[[Problem], tuple[RecomputeOption, ...]]) -> int:
    """Return the bound minus the time of the fastest step found. If the bound is true, the result is at most
    0.

    The function plans up to 12 random sets of recomputed tensors.
    """
    profile, machine = network(seed), toys.machine(device=10**9, rate=toys.BYTE_PER_US // 4)
    problem = build_problem(profile, machine)
    budget = (int(problem.live.max()) + smallest_budget(profile)) // 2
    candidates = candidates_of(problem)
    bound = lower_bound(problem, machine, budget, time_limit_s=10.0, again=candidates)
    names = [profile.tensors[each.tensor].name for each in candidates]
    sets = [chosen for count in range(len(names) + 1) for chosen in combinations(names, count)]
    steps = []
    for chosen in Random(seed).sample(sets, min(len(sets), 12)):
        step = profile_with_recomputation(profile, chosen)
        if smallest_budget(step) <= budget:
            plan = planners.plan(step, machine, budget, planner="greedy", time_limit_s=5.0)
            steps.append(plan.predicted.step_ns)
    return bound.step_ns - min(steps) if steps else 0


@pytest.mark.parametrize("seed", range(8))
def test_no_set_of_tensors_and_no_plan_for_it_beats_the_bound(seed: int) -> None:
    """Plan for random sets of recomputed tensors. No planned step may be shorter than the bound."""
    assert shortfall(seed, again_rows.find_recompute_options) <= 0


def test_a_bound_that_counts_too_many_kernels_is_beaten() -> None:
    def too_many(problem: Problem) -> tuple[RecomputeOption, ...]:
        forward = [tick for tick, kernel in enumerate(problem.profile.kernels) if kernel.call == 0]
        return tuple(
            replace(each, kernels=tuple(forward)) for each in again_rows.find_recompute_options(problem)
        )

    assert any(shortfall(seed, too_many) > 0 for seed in range(8))


def test_recomputing_beats_a_slow_link_and_the_plan_names_the_tensor() -> None:
    """Plan a step that can either move 6 bytes over a link of 1 byte per us, or recompute them in 1 us."""
    machine = toys.machine(device=12)
    fixed = planners.plan(two_layers(), machine, 12, time_limit_s=5.0)
    made = planners.plan(two_layers(), machine, 12, time_limit_s=5.0, recompute=True)
    assert fixed.recompute == () and "b" in made.recompute
    assert made.predicted.bound_ns <= made.predicted.step_ns < fixed.predicted.step_ns
    assert check_plan_against_profile(made, two_layers(), machine).feasible
    alone, step = apply_plan_changes(made, two_layers())
    assert check_plan_against_profile(alone, step, machine) == check_plan_against_profile(
        made, two_layers(), machine
    )


def test_nothing_is_recomputed_if_everything_fits() -> None:
    made = planners.plan(two_layers(), toys.machine(device=100), 100, recompute=True)
    assert made.recompute == () and made.predicted.step_ns == 6 * toys.US


def test_a_set_whose_kernels_do_not_fit_is_not_chosen() -> None:
    """Refuse to recompute b if the workspace of its kernel does not fit in the budget."""
    kernels = list(two_layers().kernels)
    kernels[1] = replace(kernels[1], workspace_bytes=9)
    step = replace(two_layers(), kernels=tuple(kernels))
    assert joint_recompute._trim_set_to_memory(step, ("b",), 18) == ()
    assert joint_recompute._trim_set_to_memory(step, ("b",), 19) == ("b",)


def test_a_set_that_does_not_fit_is_trimmed_until_it_fits() -> None:
    """Trim sets of tensors if the recomputed copies of a set do not fit in memory."""
    parts = set()
    for seed in range(12):
        for names in filter(None, subsets(network(seed), seed, 4)):
            most = int(build_problem(profile_with_recomputation(network(seed), names)).floor.max())
            assert joint_recompute._trim_set_to_memory(network(seed), names, most) == names
            fit = joint_recompute._trim_set_to_memory(network(seed), names, most - 1)
            assert set(fit) < set(names)
            assert not fit or build_problem(profile_with_recomputation(network(seed), fit)).floor.max() < most
            parts.add(bool(fit))
    assert True in parts


def test_tensors_whose_names_differ_by_a_number_follow_the_majority() -> None:
    names = [f"layers.{n}.{what}" for n in range(4) for what in ("add1.out", "add2.out", "mul")]
    taken = [
        "layers.0.add1.out",
        "layers.1.add1.out",
        "layers.3.add1.out",
        "layers.2.add2.out",
        "layers.0.mul",
    ]
    added = set(joint_recompute._add_alike_tensors(taken, names)) - set(taken)
    assert added == {"layers.2.add1.out"}
    assert joint_recompute._add_alike_tensors([], names) == ()


def test_among_equally_fast_sets_the_lowest_bound_is_chosen() -> None:
    """Choose the same set of tensors for both orders of the candidate sets.

    If no time is left, choose the first candidate.
    """
    machine = toys.machine(device=12)
    sets: list[tuple[str, ...]] = [(), ("b",)]
    for given in (sets, sets[::-1]):
        steps = {
            names: build_problem(profile_with_recomputation(two_layers(), names), machine) for names in given
        }
        assert joint_recompute._recompute_set_with_lowest_bound(steps, machine, 12, monotonic() + 60) == (
            "b",
        )
        assert joint_recompute._recompute_set_with_lowest_bound(steps, machine, 12, 0.0) == given[0]


def test_the_plan_command_prints_recomputed_tensors_and_explains_the_plan(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, machine, plan = (f"{tmp_path}/{name}.json" for name in ("profile", "machine", "plan"))
    two_layers().write(profile)
    toys.machine(device=12).write(machine)
    common = [profile, "--machine", machine]
    flags = ["--memory", "12", "--recompute", "auto", "--plan-time", "2s", "-o", plan, "--json"]
    line = f"{tmp_path}/line.json"
    assert main.main(["plan", *common, *flags, "--timeline", line]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["again"] >= 1 and figures["again_ns"] >= toys.US and figures["feasible"]
    assert Timeline.read(line).step_ns == figures["step_ns"]
    assert main.main(["simulate", plan, *common]) == 0
    assert main.main(["explain", plan, *common, "--what-if", "off"]) == 0
    capsys.readouterr()
    # `--what-if bound` and `--what-if plan` must allow the recomputations of the plan.
    for by in ("bound", "plan"):
        assert main.main(["explain", plan, *common, "--what-if", by, "--plan-time", "2s", "--json"]) == 0
        again = json.loads(capsys.readouterr().out)["what_if"][0]
        assert again["bound_ns"] == figures["bound_ns"]
        assert again["step_ns"] in (None, figures["step_ns"])
    assert Plan.read(plan).recompute
