"""Tests of late updates: which updates can run late, and that each kernel still reads the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import toys

from teraio.cli import main
from teraio.errors import OptionError, PlanError
from teraio.formats import late_updates
from teraio.formats.late_updates import ON_HOST, Update, find_updates, profile_with_late_updates
from teraio.formats.plan import Plan
from teraio.formats.plan_check import check_plan_against_profile
from teraio.formats.planned_step import apply_plan_changes
from teraio.formats.profile import Kernel, Profile, Tensor
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
    late = profile_with_late_updates(profile, ["w0", "w1"])
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
    assert profile_with_late_updates(profile, []) is profile
    late = profile_with_late_updates(profile, ["w1"])
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
        profile_with_late_updates(replace(profile, tensors=tensors), [name])


def test_a_gradient_that_an_update_only_writes_lives_until_then() -> None:
    """The update of w0 also fills the gradient of another weight with zeros."""
    profile = toys.training_profile(layers=2)
    other = Tensor("other", "grad", 50, False, (3,), (2, 4))
    late = profile_with_late_updates(replace(profile, tensors=(*profile.tensors, other)), ["w0"])
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
    late = profile_with_late_updates(replace(profile, kernels=kernels), ["w0", "w1"])
    found = {kernel.name: kernel.workspace_bytes for kernel in late.kernels}
    # k4 runs between k3 of the step before and k0; k5 runs between k0 and k1. All kernels have 5 bytes.
    assert (found["k4"], found["k5"]) == (100 + 9 - 5, 100 + 7 - 5)  # k0 makes a larger tensor


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


def differing_seeds(seeds: range) -> tuple[list[int], int]:
    """Return two things: the seeds for which a kernel reads other bytes with late updates, and the number of
    late updates.
    """
    wrong, moved = [], 0
    for seed in seeds:
        profile = toys.random_training(seed)
        profile.validate()
        updates = [it for it in find_updates(profile) if Random(seed + it.tick).random() < 0.7]
        late = profile_with_late_updates(profile, weights_of(updates))
        late.validate()
        moved += len(updates)
        names = {profile.kernels[update.tick].name for update in updates}
        before, after = reads_by_kernel(profile, set()), reads_by_kernel(late, names)
        if any(sorted(before[run]) != sorted(reads) for run, reads in after.items()):
            wrong.append(seed)
    return wrong, moved


def test_each_kernel_reads_the_same_bytes() -> None:
    wrong, moved = differing_seeds(range(600))
    assert wrong == [] and moved > 600


@pytest.mark.parametrize("plant", ["a later use is forgotten", "a later write is forgotten"])
def test_a_wrong_rule_changes_the_bytes(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = late_updates._may_wait_after

    def wrong(tensor: Tensor, tick: int, conflict: int) -> bool:
        is_forgotten = (tick in tensor.writes) == (plant == "a later use is forgotten")
        return real(tensor, tick, min(conflict, tick) if is_forgotten else conflict)

    monkeypatch.setattr(late_updates, "_may_wait_after", wrong)
    assert differing_seeds(range(600))[0]


def test_random_late_steps_are_planned_and_checked() -> None:
    planned = 0
    for seed in range(60):
        profile = toys.random_training(seed)
        late = profile_with_late_updates(profile, weights_of(find_updates(profile)))
        floor, live = smallest_budget(late), int(build_problem(late).live.max())
        machine = toys.machine(device=10**6, ssd=10**6, rate=20 * toys.BYTE_PER_US)
        made = plan(profile, machine, (floor + live) // 2, planner="greedy", updates="late")
        assert check_plan_against_profile(made, profile, machine).feasible
        alone, step = apply_plan_changes(made, profile)
        assert step == late and (alone.late, alone.recompute) == ((), ())
        assert simulate_by_events(alone, step, machine).step_ns == made.predicted.step_ns
        planned += bool(made.moves)
    assert planned > 30


# ---- files and commands


def test_a_plan_with_late_updates_has_version_2() -> None:
    text = Plan("", "", 0, late=("w",)).dumps()
    assert json.loads(text)["version"] == 2 and Plan.loads(text).late == ("w",)
    assert '"late"' not in Plan("", "", 0).dumps()
    with pytest.raises(Exception, match="late: is a key of version 2; the version of this file is 1"):
        Plan.loads(text.replace('"version":2', '"version":1'))


def waiting_profile() -> Profile:
    """Return a training whose updates take no time, and whose forward hides transfers."""
    profile = toys.training_profile(layers=6)
    kernels = tuple(Kernel(k.name, 0, 900 * toys.US if i < 12 else 0) for i, k in enumerate(profile.kernels))
    return replace(profile, kernels=kernels)


def test_commands_make_and_read_plans_with_late_updates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, machine = tmp_path / "a.profile.json", tmp_path / "a.machine.json"
    waiting_profile().write(profile)
    toys.machine(device=10**4, ssd=10**6).write(machine)
    steps = {}
    for updates in ("step", "late"):
        made = tmp_path / f"{updates}.plan.json"
        asked = ["plan", str(profile), "--machine", str(machine), "--memory", "1800", "--updates", updates]
        assert main.main([*asked, "--planner", "search", "--json", "-o", str(made)]) == 0
        steps[updates] = json.loads(capsys.readouterr().out)["step_ns"]
        assert Plan.read(made).late == (("w0", "w1", "w2", "w3", "w4", "w5") if updates == "late" else ())
        for command in ("simulate", "explain"):
            assert main.main([command, str(made), str(profile), "--machine", str(machine), "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["step_ns"] == steps[updates]
    assert steps["late"] < steps["step"]


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
