"""Tests of updates at other places: which can run there, and that each kernel still reads the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import toys

from teraio.cli import main
from teraio.errors import OptionError, PlanError
from teraio.formats import updates as places
from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.recompute import find_recompute_gaps, profile_with_recomputation
from teraio.formats.updates import (
    ON_HOST,
    Update,
    find_backward_updates,
    find_updates,
    profile_with_updates,
)
from teraio.passes.planner.planners import plan
from teraio.passes.planner.problem.problem import build_problem, smallest_budget
from teraio.passes.planner.simulate.event_simulation import simulate_by_events

STEPS = 5
Reads = dict[tuple[str, int], list[tuple[str, int]]]


def weights_of(updates: Iterable[Update]) -> list[str]:
    return [name for update in updates for name in update.weights]


def test_updates_move_before_the_first_use_of_their_weights() -> None:
    """Two layers: forward at ticks 0 and 1, backward at 2 and 3, updates at 4 and 5."""
    profile = toys.training_profile(layers=2)
    assert find_updates(profile) == (Update(4, 0, ("w0",)), Update(5, 1, ("w1",)))
    late = profile_with_updates(profile, ["w0", "w1"])
    late.validate()
    assert [kernel.name for kernel in late.kernels] == ["k4", "k0", "k5", "k1", "k2", "k3"]
    tensors = {tensor.name: tensor for tensor in late.tensors}
    assert tensors["w1"] == toys.weight("w1", 100, (3, 4), (2,))
    assert tensors["g0"] == Tensor("g0", "grad", 100, False, (0,), (5,), born=5)
    assert tensors["a1"] == toys.activation("a1", 100, 3, (4,))
    assert late.compute_ns == profile.compute_ns
    # A gradient has no bytes between its update and the backward.
    assert build_problem(late).live.tolist() == [800, 800, 800, 800, 900, 900]


def test_only_the_named_weights_move() -> None:
    profile = toys.training_profile(layers=3)
    assert profile_with_updates(profile, []) is profile
    late = profile_with_updates(profile, ["w1"])
    assert [kernel.name for kernel in late.kernels] == ["k0", "k7", "k1", "k2", "k3", "k4", "k5", "k6", "k8"]
    assert [t.name for t in late.tensors if t.born is not None] == ["g1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w9", "late update of 'w9' is not possible in profile 'training': there is no such weight"),
        ("w0", "late update of 'w0' .*: its update cannot run in the next step"),
        ("w1", "late update of 'w1' .*: its update also writes 'more', which is not late"),
    ],
)
def test_an_impossible_late_update_is_refused(name: str, message: str) -> None:
    profile = toys.training_profile(layers=2)
    looked_at = replace(profile.tensors[0], reads=(*profile.tensors[0].reads, 5))
    more = toys.weight("more", 10, (1,), (5,))
    tensors = (looked_at, *profile.tensors[1:4], *profile.tensors[4:], more)
    with pytest.raises(PlanError, match=message):
        profile_with_updates(replace(profile, tensors=tensors), [name])


def test_a_gradient_that_an_update_only_writes_lives_until_then() -> None:
    """The update of w0 also fills the gradient of another weight with zeros."""
    profile = toys.training_profile(layers=2)
    other = Tensor("other", "grad", 50, False, (3,), (2, 4))
    late = profile_with_updates(replace(profile, tensors=(*profile.tensors, other)), ["w0"])
    late.validate()
    (moved,) = [tensor for tensor in late.tensors if tensor.name == "other"]
    assert [late.kernels[tick].name for tick in (*moved.writes, *moved.reads)] == ["k4", "k2", "k3"]
    assert moved.born is not None and late.kernels[moved.born].name == "k2"


def test_an_update_by_the_host_runs_at_the_step() -> None:
    profile = toys.training_profile(layers=3)
    kernels = tuple(
        replace(k, name=f"{k.name}{ON_HOST}" if k.name == "k7" else k.name) for k in profile.kernels
    )
    found = find_updates(replace(profile, kernels=kernels))
    assert [update.weights for update in found] == [("w0",), ("w2",)]


def test_a_late_update_gets_the_memory_of_its_neighbours() -> None:
    profile = toys.training_profile(layers=2)
    sizes = (7, 20, 5, 9, 100, 100)
    kernels = tuple(replace(k, workspace_bytes=size) for k, size in zip(profile.kernels, sizes, strict=True))
    late = profile_with_updates(replace(profile, kernels=kernels), ["w0", "w1"])
    found = {kernel.name: kernel.workspace_bytes for kernel in late.kernels}
    # k4 runs between k3 of the step before and k0; k5 runs between k0 and k1. All kernels have 5 bytes.
    assert (found["k4"], found["k5"]) == (100 + 9 - 5, 100 + 7 - 5)  # k0 makes a larger tensor


def backward_training(layers: int = 3) -> Profile:
    """Return a training with calls. Layer i's forward is tick i, its backward is tick 2 * layers - 1 - i."""
    return toys.in_three_calls(toys.training_profile(layers))


def test_updates_move_behind_the_last_use_of_their_tensors() -> None:
    """Three layers: forward at ticks 0 to 2, backward at 3 to 5, updates at 6 to 8."""
    profile = backward_training()
    # The gradient of w0 comes from the last kernel of the backward, so its update is in no call.
    assert find_backward_updates(profile) == (Update(7, 5, ("w1",)), Update(8, 4, ("w2",)))
    step = profile_with_updates(profile, backward=["w1", "w2"])
    step.validate()
    assert [kernel.name for kernel in step.kernels] == ["k0", "k1", "k2", "k3", "k8", "k4", "k7", "k5", "k6"]
    assert [kernel.call for kernel in step.kernels] == [0, 0, 0, 1, 1, 1, 1, 1, 2]
    tensors = {tensor.name: tensor for tensor in step.tensors}
    assert tensors["w2"] == toys.weight("w2", 100, (2, 3), (4,))
    assert tensors["g2"] == Tensor("g2", "grad", 100, False, (4,), (3,))
    assert build_problem(step).live.tolist()[4:7] == [1200, 1200, 1100]
    assert step.compute_ns == profile.compute_ns


def test_updates_of_both_places_move() -> None:
    step = profile_with_updates(backward_training(), ["w0"], ["w1", "w2"])
    step.validate()
    assert [kernel.name for kernel in step.kernels] == ["k6", "k0", "k1", "k2", "k3", "k8", "k4", "k7", "k5"]
    assert [tensor.name for tensor in step.tensors if tensor.born is not None] == ["g0"]


def test_updates_at_one_tick_keep_their_order() -> None:
    """One kernel of the backward makes the gradients of w1 and w2."""
    profile = backward_training()
    tensors = tuple(replace(t, writes=(4,)) if t.name == "g2" else t for t in profile.tensors)
    step = profile_with_updates(replace(profile, tensors=tensors), backward=["w2", "w1"])
    assert [kernel.name for kernel in step.kernels][4:] == ["k4", "k7", "k8", "k5", "k6"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("g2", {"reads": (4, 6, 8)}),  # another update reads the gradient
        ("g2", {"writes": (2, 3)}),  # two calls make the gradient
        ("g2", {"writes": (3, 8)}),  # the update changes the gradient
        ("g2", {"persistent": True}),
        ("g2", {"reads": (2,), "writes": (3, 8), "born": 3}),
        ("w2", {"reads": (2, 3, 5)}),  # the last kernel of the backward reads the weight
        ("w2", {"reads": (2, 3, 6)}),
        ("m2", {"kind": "activation", "persistent": False, "reads": (4, 8), "writes": (2,)}),
        ("m2", {"kind": "input"}),
    ],
)
def test_an_update_with_other_uses_does_not_run_in_the_backward(name: str, change: dict[str, Any]) -> None:
    profile = backward_training()
    tensors = tuple(replace(t, **change) if t.name == name else t for t in profile.tensors)
    profile = replace(profile, tensors=tensors)
    profile.validate()
    assert [update.weights for update in find_backward_updates(profile)] == [("w1",)]
    message = "update of 'w2' in the backward is not possible in profile 'training': its update cannot run in"
    with pytest.raises(PlanError, match=message):
        profile_with_updates(profile, backward=["w1", "w2"])


def test_an_update_by_the_host_does_not_run_in_the_backward() -> None:
    profile = backward_training()
    kernels = tuple(replace(k, name=k.name + ON_HOST * (k.name == "k7")) for k in profile.kernels)
    assert find_backward_updates(replace(profile, kernels=kernels)) == (Update(8, 4, ("w2",)),)


def test_impossible_updates_in_the_backward_are_refused() -> None:
    profile = backward_training()
    with pytest.raises(PlanError, match=r"'w9' in the backward is not .*: there is no such weight"):
        profile_with_updates(profile, backward=["w9"])
    with pytest.raises(PlanError, match="'w1' cannot have both a late update and an update in the backward"):
        profile_with_updates(profile, ["w0", "w1"], ["w1"])
    more = toys.weight("more", 10, (1,), (7,))
    with pytest.raises(PlanError, match="also writes 'more', which is not in the backward"):
        profile_with_updates(replace(profile, tensors=(*profile.tensors, more)), backward=["w1"])


def test_an_update_in_the_backward_gets_the_memory_of_its_neighbours() -> None:
    profile = backward_training()
    sizes = (7, 20, 5, 9, 14, 90, 100, 100, 100)
    kernels = tuple(replace(k, workspace_bytes=size) for k, size in zip(profile.kernels, sizes, strict=True))
    step = profile_with_updates(replace(profile, kernels=kernels), backward=["w1", "w2"])
    found = {kernel.name: kernel.workspace_bytes for kernel in step.kernels}
    # k8 runs between k3 and k4, and k7 between k4 and k5, whose gradients count. All kernels have 5 bytes.
    assert (found["k8"], found["k7"]) == (100 + 9 - 5, 100 + 14 - 5)


def test_a_rerun_that_reads_the_weight_comes_before_its_update() -> None:
    """Tick 2 makes an activation from w2, and tick 4 reads it. With w2 updated before tick 4, a rerun would
    read the new weight.
    """
    profile = backward_training(4)
    tensors = tuple(
        replace(t, reads=(6,), recompute_from=(2,)) if t.name == "a2" else t for t in profile.tensors
    )
    profile = replace(profile, tensors=tensors)
    assert find_backward_updates(profile)[-2] == Update(10, 6, ("w2",))
    made = Plan("", "", 0, recompute=("a2",), backward=("w2", "w1"))
    _, step = apply_plan_changes(made, profile)
    assert [kernel.name for kernel in step.kernels][5:10] == ["k5", "k2.again", "k10", "k6", "k9"]
    assert find_recompute_gaps(profile)
    with pytest.raises(PlanError):
        profile_with_recomputation(profile_with_updates(profile, backward=["w2"]), ["a2"])


# ---- the same bytes


def reads_by_kernel(profile: Profile, late: set[str]) -> Reads:
    """Run steps. Return, for each run of a kernel, the runs whose bytes it reads.

    A run is (kernel, step). A kernel in `late` belongs to the step before, so the first step omits it.
    """
    last: dict[str, tuple[str, int]] = {}
    found: Reads = {}
    for lap in range(STEPS):
        for tick, kernel in enumerate(profile.kernels):
            step = lap - (kernel.name in late)
            if step < 0:
                continue
            used = [tensor for tensor in profile.tensors if tick in tensor.reads]
            found[kernel.name, step] = [last.get(t.name, (t.name, -1)) for t in used]
            last |= {tensor.name: (kernel.name, step) for tensor in profile.tensors if tick in tensor.writes}
    return found


def differing_seeds(seeds: range, backward: bool = False, valid: bool = True) -> tuple[list[int], int]:
    """Return two things: the seeds for which a kernel reads other bytes with moved updates, and the number of
    late updates, or of updates in the backward.

    If `backward` is True, updates run in the backward, too. If `valid` is True, each step must be valid.
    """
    wrong, moved = [], 0
    for seed in seeds:
        profile = toys.in_three_calls(toys.random_training(seed))
        profile.validate()
        early = [it for it in find_backward_updates(profile) if Random(seed + it.tick).random() > 0.4]
        early = early if backward else []
        moved_weights = {*weights_of(early)}
        late = [it for it in find_updates(profile) if moved_weights.isdisjoint(it.weights)]
        late = [it for it in late if Random(seed + it.tick).random() < 0.7]
        step = profile_with_updates(profile, weights_of(late), weights_of(early))
        if valid:
            step.validate()
        moved += len(early if backward else late)
        names = {profile.kernels[update.tick].name for update in late}
        before, after = reads_by_kernel(profile, set()), reads_by_kernel(step, names)
        if any(sorted(before[run]) != sorted(reads) for run, reads in after.items()):
            wrong.append(seed)
    return wrong, moved


def test_each_kernel_reads_the_same_bytes() -> None:
    wrong, moved = differing_seeds(range(600))
    assert wrong == [] and moved > 600


def test_each_kernel_reads_the_same_bytes_with_updates_in_the_backward() -> None:
    wrong, moved = differing_seeds(range(600), backward=True)
    assert wrong == [] and moved > 300


@pytest.mark.parametrize("plant", ["one tick too early", "uses of weights are forgotten"])
def test_an_update_too_early_changes_the_bytes(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = places._last_use_before

    def wrong(tensor: Tensor, tick: int) -> int:
        last = real(tensor, tick)
        if plant == "one tick too early":
            return last - 1
        return -1 if tensor.kind == "weight" else last

    monkeypatch.setattr(places, "_last_use_before", wrong)
    assert differing_seeds(range(600), backward=True, valid=False)[0]


@pytest.mark.parametrize("plant", ["a later use is forgotten", "a later write is forgotten"])
def test_a_wrong_rule_changes_the_bytes(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = places._may_wait_after

    def wrong(tensor: Tensor, tick: int, conflict: int) -> bool:
        is_forgotten = (tick in tensor.writes) == (plant == "a later use is forgotten")
        return real(tensor, tick, min(conflict, tick) if is_forgotten else conflict)

    monkeypatch.setattr(places, "_may_wait_after", wrong)
    assert differing_seeds(range(600))[0]


def test_random_late_steps_are_planned_and_checked() -> None:
    planned = 0
    for seed in range(60):
        profile = toys.random_training(seed)
        late = profile_with_updates(profile, weights_of(find_updates(profile)))
        floor, live = smallest_budget(late), int(build_problem(late).live.max())
        machine = toys.machine(device=10**6, ssd=10**6, rate=20 * toys.BYTE_PER_US)
        made = plan(profile, machine, (floor + live) // 2, planner="greedy", updates="late")
        assert check_plan_against_profile(made, profile, machine).feasible
        alone, step = apply_plan_changes(made, profile)
        assert step == late and (alone.late, alone.recompute) == ((), ())
        assert simulate_by_events(alone, step, machine).step_ns == made.predicted.step_ns
        planned += bool(made.moves)
    assert planned > 30


def test_random_steps_with_updates_in_the_backward_are_planned_and_checked() -> None:
    planned = 0
    for seed in range(60):
        profile = toys.in_three_calls(toys.random_training(seed))
        early = weights_of(find_backward_updates(profile))
        late = weights_of(it for it in find_updates(profile) if not {*early}.intersection(it.weights))
        step = profile_with_updates(profile, late, early)
        floor, live = smallest_budget(step), int(build_problem(step).live.max())
        machine = toys.machine(device=10**6, ssd=10**6, rate=20 * toys.BYTE_PER_US)
        alone = plan(step, machine, (floor + live) // 2, planner="greedy")
        made = replace(alone, late=tuple(late), backward=tuple(early))
        assert check_plan_against_profile(made, profile, machine).feasible
        assert apply_plan_changes(made, profile) == (alone, step)
        assert simulate_by_events(alone, step, machine).step_ns == made.predicted.step_ns
        planned += bool(early)
    assert planned > 20
    both = replace(made, late=tuple(early or late)[:1], backward=tuple(early))
    assert bool(early) != check_plan_against_profile(both, profile, machine).feasible


# ---- files and commands


@pytest.mark.parametrize("place", ["late", "backward"])
def test_a_plan_with_moved_updates_has_version_2(place: str) -> None:
    text = Plan("", "", 0, **{place: ("w",)}).dumps()  # type: ignore[arg-type]
    assert json.loads(text)["version"] == 2 and getattr(Plan.loads(text), place) == ("w",)
    assert f'"{place}"' not in Plan("", "", 0).dumps()
    with pytest.raises(Exception, match="is a key of version 2; the version of this file is 1"):
        Plan.loads(text.replace('"version":2', '"version":1'))
    with pytest.raises(Exception, match=rf"{place}\[1\]"):
        Plan.loads(Plan("", "", 0, **{place: ("w", "w")}).dumps())  # type: ignore[arg-type]


def waiting_profile() -> Profile:
    """Return a training whose updates take no time, and whose forward hides transfers."""
    profile = toys.in_three_calls(toys.training_profile(layers=6))
    kernels = tuple(
        Kernel(k.name, k.call, 900 * toys.US if i < 12 else 0) for i, k in enumerate(profile.kernels)
    )
    return replace(profile, kernels=kernels)


def test_commands_make_and_read_plans_with_moved_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, machine = tmp_path / "a.profile.json", tmp_path / "a.machine.json"
    waiting_profile().write(profile)
    toys.machine(device=10**4, ssd=10**6).write(machine)
    steps = {}
    for updates in ("step", "late", "backward"):
        made = tmp_path / f"{updates}.plan.json"
        asked = ["plan", str(profile), "--machine", str(machine), "--memory", "1800", "--updates", updates]
        assert main.main([*asked, "--planner", "search", "--json", "-o", str(made)]) == 0
        steps[updates] = json.loads(capsys.readouterr().out)["step_ns"]
        plan_, names = Plan.read(made), ("w0", "w1", "w2", "w3", "w4", "w5")
        assert plan_.late == (names if updates == "late" else names[:1] if updates == "backward" else ())
        assert sorted(plan_.backward) == [*(names[1:] if updates == "backward" else ())]
        for command in ("simulate", "explain"):
            assert main.main([command, str(made), str(profile), "--machine", str(machine), "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["step_ns"] == steps[updates]
    assert steps["backward"] <= steps["late"] < steps["step"]
    assert main.main([*asked, "--planner", "greedy"]) == 0
    text = capsys.readouterr().out
    assert " with late updates of 1 weight and with updates of 5 weights in the backward, " in text
    assert "for this profile with updates at any place (" in text


def test_the_smallest_budget_is_that_of_the_late_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = toys.training_profile(layers=6)
    kernels = tuple(replace(k, workspace_bytes=90 * (i < 12)) for i, k in enumerate(profile.kernels))
    replace(profile, kernels=kernels).write(tmp_path / "a.profile.json")
    toys.machine(device=10**4, ssd=10**6).write(tmp_path / "a.machine.json")
    asked = [
        "plan",
        str(tmp_path / "a.profile.json"),
        "--machine",
        str(tmp_path / "a.machine.json"),
        "--json",
    ]
    found = {}
    for updates in ("step", "late", "auto"):
        assert main.main([*asked, "--memory", "min", "--updates", updates]) == 0
        found[updates] = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert found["step"] < found["late"]


def test_a_report_of_a_late_plan_has_the_uses_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: str(tmp_path / f"a.{name}.json") for name in ("profile", "machine", "plan", "timeline")}
    waiting_profile().write(names["profile"])
    toys.machine(device=10**4, ssd=10**6).write(names["machine"])
    asked = ["--memory", "1800", "--updates", "late", "--planner", "greedy", "--timeline", names["timeline"]]
    plan_it = ["plan", names["profile"], "--machine", names["machine"], *asked, "-o", names["plan"]]
    assert main.main(plan_it) == 0
    more = ["--profile", names["profile"], "--plan", names["plan"], "--machine", names["machine"]]
    capsys.readouterr()
    assert main.main(["report", names["timeline"], *more, "--what-if", "bound"]) == 0
    assert "another step" not in capsys.readouterr().out


def test_wrong_placements_are_refused() -> None:
    with pytest.raises(OptionError, match="updates='Late'"):
        plan(waiting_profile(), toys.machine(), 1800, updates="Late")
