"""A small training, with any plan and without a plan. The numbers are equal to the numbers without teraio,
and memory is within the budget."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tree
from children import forked, one_by_one
from for_now import folder_for_now

from teraio.cli import main
from teraio.formats.machine import Link, Machine, Tier
from teraio.formats.plan import Plan

HERE = tree.SUPPORT
PLAIN = {"name": "plain"}
PLANTED = ("drop_the_wait", "skip_the_write", "forget_the_update")
STORE_ERRORS = {
    "StoreFullError",
    "StoreWriteError",
    "StoreReadError",
    "CorruptTensorError",
    "TornStepError",  # raised if an optimizer's step fails
}
FAULTS: dict[str, dict[str, Any]] = {
    "a write fails once": {"kind": "EIO", "op": "write", "nth": 30},
    "writes fail from then on": {"kind": "EIO", "op": "write", "nth": 60, "sticky": True},
    "the disk is full": {"kind": "ENOSPC", "op": "write", "nth": 60, "sticky": True},
    "a read fails once": {"kind": "EIO", "op": "read", "nth": 30},
    "reads fail from then on": {"kind": "EIO", "op": "read", "nth": 60, "sticky": True},
    "a bit flips": {"kind": "flip", "op": "read", "nth": 45},
    "a write is acknowledged and not done": {"kind": "stale", "op": "write", "nth": 70},
    "a neighbour's block is read": {"kind": "neighbour", "op": "read", "nth": 50},
    "a write is short": {"kind": "short", "op": "write", "nth": 10},
}
FOLDER = folder_for_now("training")


def ran(*runs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run trainings in one process, with one compile.

    Return a pair: the results by name, and the stderr if the process failed. If a training ends the process,
    the results lack this training and all later trainings.
    """
    done = forked(HERE / "train.py", json.dumps(runs))
    result: dict[str, Any] = {}
    for each in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
        result[each["run"]] = {**each, "log": done.stderr}
        peak = max(each["peaks"], default=0)
        print(each["run"], each["budget"], peak, each["counts"][-1:], each["error"][:200])
    return result, done.stderr[-3000:] if done.returncode else ""


@cache
def eager_runs() -> dict[str, Any]:
    hostile = [
        {"name": f"hostile{n}", "of": "plain", "part": 0.5, "hostile": n + 1, "steps": 5} for n in range(3)
    ]
    plain5 = {"name": "plain5", "steps": 5}
    tight = {"name": "tight", "of": "plain", "part": 0.2}
    half = {"name": "half", "of": "plain", "part": 0.5, "options": {"planner": "auto"}}
    demand = {**half, "name": "demand", "options": {"planner": "none"}}
    lean = {"name": "lean", "of": "plain", "part": 0.36}
    plan = str(FOLDER / "other.plan.json")
    Plan("0" * 32, "greedy", 2**30).write(plan)
    other = {**half, "name": "other plan", "steps": 5, "options": {"plan": plan}}
    plain4 = {"name": "plain4", "steps": 4}
    faulty = {"of": "plain", "part": 0.36, "steps": 4, "options": {"planner": "none"}}
    faults = [{**faulty, "name": name, "fault": rule} for name, rule in FAULTS.items()]
    afterwards = {**faulty, "name": "afterwards"}
    runs: tuple[dict[str, Any], ...]
    runs = (PLAIN, plain5, half, demand, lean, tight, other, *hostile, plain4, *faults, afterwards)
    result, failed = ran(*runs)
    assert not failed, failed
    return result


@cache
def later_runs() -> dict[str, Any]:
    """Run a second process: first the offline plan, then one run for each planted bug, and finally a run
    without a bug."""
    runs = eager_runs()
    replay = {"name": "replay", "budget": runs["half"]["budget"], "options": {"plan": offline_plan()}}
    lean = {"budget": runs["lean"]["budget"], "options": {"planner": "none"}, "steps": 5}
    wanted = [replay, *({**lean, "name": bug, "plant": bug} for bug in PLANTED)]
    wanted.append({**lean, "name": "afterwards"})
    found = one_by_one(wanted, lambda left: [*ran(*left)[0].values()])
    return {each["name"]: result for each, result in zip(wanted, found)}


@cache
def offline_plan() -> str:
    """Make a plan for a finished run with `teraio plan`. Return the path of the plan."""
    budget = eager_runs()["half"]["budget"]
    profile, machine, plan = (str(FOLDER / f"run.{kind}.json") for kind in ("profile", "machine", "plan"))
    _, failed = ran({"name": "half", "budget": budget, "options": {"profile": profile, "planner": "none"}})
    assert not failed, failed
    links = (Link("device", "ssd", 10**9), Link("ssd", "device", 10**9))
    Machine("toy", (Tier("device", 2**40), Tier("ssd", 2**40)), links).write(machine)
    assert main.main(["plan", profile, "--machine", machine, "--memory", str(budget), "-o", plan]) == 0
    return plan


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["losses"] == other["losses"] and one["digest"] == other["digest"])


def test_a_llama_trains_bit_equal_within_half_of_its_memory() -> None:
    runs = eager_runs()
    half = runs["half"]
    assert not half["error"]
    assert same(half, runs["plain"])
    assert max(half["peaks"]) <= half["budget"]
    assert half["counts"][-1]["fetches"] > 20, "nothing moved: the test shows nothing"


def test_llama_trains_bit_equal_near_smallest_budget() -> None:
    runs = eager_runs()
    lean = runs["lean"]
    assert not lean["error"]
    assert same(lean, runs["plain"])
    assert max(lean["peaks"]) <= lean["budget"]


def test_planned_step_has_no_misses() -> None:
    counts = eager_runs()["half"]["counts"]
    # The second step is measured; it has no plan, so its fetches count as misses.
    assert counts[1]["misses"] > 20
    for planned in counts[5:]:
        assert planned["misses"] == 0
        assert planned["skipped_moves"] == 0
        assert planned["planned_moves"] > 20


def test_training_on_demand_is_bit_equal_within_budget() -> None:
    runs = eager_runs()
    assert same(runs["demand"], runs["plain"])
    assert max(runs["demand"]["peaks"]) <= runs["demand"]["budget"]
    assert runs["demand"]["counts"][-1]["misses"] > 20


def test_hostile_plan_keeps_numbers_and_budget() -> None:
    runs = eager_runs()
    for number in range(3):
        hostile = runs[f"hostile{number}"]
        assert not hostile["error"]
        assert same(hostile, runs["plain5"])
        assert max(hostile["peaks"]) <= hostile["budget"]
        assert sum(c["planned_moves"] for c in hostile["counts"]) > 50


def test_budget_error_names_smallest_working_budget() -> None:
    error = eager_runs()["tight"]["error"]
    assert error.startswith("BudgetError: the step needs ")
    for part in ("at kernel ", "memory is ", "Give at least ", "smaller batch"):
        assert part in error


@pytest.mark.long  # a slow case; the fast suite has a smaller one in test_inductor_slots.py
def test_inductor_trains_bit_equal_within_little_more_than_half_of_its_memory() -> None:
    runs, failed = ran(
        {**PLAIN, "inner": "inductor"}, {"name": "half", "of": "plain", "part": 0.55, "inner": "inductor"}
    )
    assert not failed, failed
    half = runs["half"]
    assert not half["error"]
    assert same(half, runs["plain"])
    assert max(half["peaks"]) <= half["budget"]
    assert half["counts"][-1]["misses"] == 0
    assert half["counts"][-1]["fetches"] > 10


@pytest.mark.parametrize("bug", PLANTED)
def test_these_tests_find_a_planted_bug(bug: str) -> None:
    """Check that the planted bug changes the numbers, raises an error, or makes a kernel crash on an empty
    storage."""
    run = later_runs()[bug]
    assert run is None or run["error"] or not same(run, eager_runs()["plain5"])
    assert same(later_runs()["afterwards"], eager_runs()["plain5"]), "a bug changed later runs"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_disk_gives_the_same_numbers_or_a_named_error(fault: str) -> None:
    """No fault changes the numbers, and the process can train again after each fault."""
    runs = eager_runs()
    run = runs[fault]
    if run["error"]:
        kind = run["error"].partition(":")[0]
        assert kind in STORE_ERRORS
        assert runs["plain4"]["losses"][: len(run["losses"])] == run["losses"]
    else:
        assert same(run, runs["plain4"])
    assert same(runs["afterwards"], runs["plain4"])


def test_repairable_faults_pass_and_others_raise() -> None:
    runs = eager_runs()
    for mended in ("a write fails once", "a read fails once", "a write is short"):
        assert not runs[mended]["error"], mended
    for lost in ("writes fail from then on", "reads fail from then on", "a bit flips"):
        assert runs[lost]["error"], f"{lost}: the fault hit nothing, or a wrong block was accepted"


def test_offline_plan_is_replayed_in_another_process() -> None:
    replayed = later_runs()["replay"]
    assert replayed and not replayed["error"]
    assert same(replayed, eager_runs()["plain"])
    assert replayed["counts"][-1]["planned_moves"] == operation_count(offline_plan())
    assert [c["misses"] for c in replayed["counts"][3:]] == [0] * 5


def operation_count(path: str) -> int:
    """Return the number of operations that a plan gives the engine.

    An eviction with a write has two operations, its start and its end.
    """
    plan = Plan.read(path)
    return sum(
        2 if getattr(move, "trigger", None) is not None and hasattr(move, "to") else 1 for move in plan.moves
    )


def test_plan_for_another_step_is_not_used() -> None:
    run = eager_runs()["other plan"]
    assert same(run, eager_runs()["plain5"])
    assert "is a plan for another step" in run["log"]
    assert run["counts"][-1]["planned_moves"] == 0
