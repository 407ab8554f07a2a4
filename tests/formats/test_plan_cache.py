"""Plans from run to run: followed from the second step on, never believed, written whole by any number of
processes at once."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tree
from children import forked

from teraio.cli import main
from teraio.formats.plan import Evict, Fetch, Plan, Predicted
from teraio.formats.plan_cache import (
    ENTRIES_MAX,
    SUFFIX,
    PlanCache,
    cache_key_of,
    compiled_extension_folder,
    find_cache_folder,
    fingerprint_of_profile,
)
from teraio.formats.profile import Kernel, Profile, Tensor
from teraio.formats.schedule import READ, Buffer, Call, Schedule, Slot, Step
from teraio.options import Settings
from teraio.passes.slots import lifetimes
from teraio.session.plan_reuse import EarlierPlans

LOOKS = 500
PLAN = Plan("f" * 32, "auto", 100, (), (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TERAIO_CACHE_DIR", str(tmp_path / "cache"))
    found = find_cache_folder()
    assert found == tmp_path / "cache" / "plans"
    return found


# ---- the folder


def test_what_is_kept_is_found_by_its_key_and_by_no_other(folder: Path) -> None:
    kept = PlanCache(folder)
    assert kept.read_plan("k", PLAN.fingerprint) == (None, "")
    assert kept.write_plan("k", PLAN) == ""
    assert kept.read_plan("k", PLAN.fingerprint) == (PLAN, "")
    assert kept.read_plan("l", PLAN.fingerprint) == (None, "")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_key_of("ab", "c") != cache_key_of("a", "bc") != cache_key_of("ab", "c", "")


def test_what_others_could_have_written_is_refused_and_said(folder: Path, tmp_path: Path) -> None:
    kept = PlanCache(folder)
    kept.write_plan("k", PLAN)
    path = folder / f"k{SUFFIX}"

    def refused() -> str:
        plan, why = kept.read_plan("k", PLAN.fingerprint)
        assert plan is None
        return why

    path.chmod(0o666)
    assert "can be written by others (mode 666)" in refused()
    path.chmod(0o600)
    folder.chmod(0o777)
    assert "can be written by others (mode 777)" in refused()
    assert "can be written by others" in kept.write_plan("l", PLAN)
    folder.chmod(0o700)
    assert kept.read_plan("k", "e" * 32)[1].endswith(f"is a plan for another step (fingerprint {'f' * 32})")
    path.write_bytes(b"\x80\x04pickled")
    assert "k.plan.json.gz" in refused()
    path.unlink()
    PLAN.write(tmp_path / "elsewhere.plan.json.gz")
    path.symlink_to(tmp_path / "elsewhere.plan.json.gz")
    assert "is neither a file nor a folder" in refused()
    assert kept.write_plan("k", PLAN) == "" and not path.is_symlink()  # the link is replaced, not followed
    assert kept.read_plan("k", PLAN.fingerprint) == (PLAN, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(folder: Path) -> None:
    kept = PlanCache(folder)
    kept.write_plan("k", PLAN)
    os.chown(folder / f"k{SUFFIX}", 12345, 12345)
    assert "belongs to another user (uid 12345)" in kept.read_plan("k", PLAN.fingerprint)[1]


def test_the_least_recently_used_go(folder: Path) -> None:
    kept = PlanCache(folder)
    kept.write_plan("first", PLAN)
    raw = (folder / f"first{SUFFIX}").read_bytes()
    for number in range(ENTRIES_MAX):
        path = folder / f"{number:04}{SUFFIX}"
        path.write_bytes(raw)
        os.utime(path, (number, number))
    kept.write_plan("last", PLAN)
    names = {entry.path.name for entry in kept.entries()}
    assert len(names) == ENTRIES_MAX
    assert {f"first{SUFFIX}", f"last{SUFFIX}"} <= names and f"0000{SUFFIX}" not in names


def _write_often(folder: Path, budget: int, stop: Path) -> None:
    moves = PLAN.moves * 50  # a plan may repeat itself; only its text matters here
    until = time.monotonic() + 120  # should nobody say stop
    while not stop.exists() and time.monotonic() < until:
        PlanCache(folder).write_plan("k", replace(PLAN, budget_bytes=budget, moves=moves))


def test_processes_that_write_at_once_leave_whole_plans(folder: Path, tmp_path: Path) -> None:
    kept, stop = PlanCache(folder), tmp_path / "stop"
    kept.write_plan("k", replace(PLAN, budget_bytes=1))
    spawned = multiprocessing.get_context("fork")
    writers = [spawned.Process(target=_write_often, args=(folder, budget, stop)) for budget in (2, 3)]
    for writer in writers:
        writer.start()
    seen: set[int] = set()
    began, looks = time.monotonic(), 0
    while (looks < LOOKS or not {2, 3} <= seen) and time.monotonic() < began + 60:
        plan, why = kept.read_plan("k", PLAN.fingerprint)
        assert plan is not None and why == "", why
        seen.add(plan.budget_bytes)
        looks += 1
    stop.touch()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert {2, 3} <= seen
    assert [path.name for path in folder.iterdir()] == [f"k{SUFFIX}"]  # nothing half-written is left


def test_what_is_built_lies_beside_the_plans_and_stays_when_they_are_turned_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/x")
    for moved, folder in ("/tmp/y", "/tmp/y/built"), ("off", "/tmp/x/teraio/built"):
        monkeypatch.setenv("TERAIO_CACHE_DIR", moved)
        assert compiled_extension_folder() == Path(folder)


def test_it_can_be_turned_off_and_moved() -> None:
    assert find_cache_folder({"TERAIO_CACHE_DIR": "off"}) is None
    assert find_cache_folder({"XDG_CACHE_HOME": "/tmp/x"}) == Path("/tmp/x/teraio/plans")
    assert find_cache_folder({}) == Path.home() / ".cache/teraio/plans"


def test_the_command_lists_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = PlanCache(folder)
    kept.write_plan("k", replace(PLAN, budget_bytes=2**30, predicted=Predicted(1_500_000_000)))
    (folder / "notes.txt").write_text("mine")
    assert main.main(["cache", "list"]) == 0
    told = capsys.readouterr().out
    assert "1 plan kept" in told and "1 GiB" in told and "1.5 s per step" in told
    assert main.main(["cache", "clear"]) == 0
    assert "1 plan cleared" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    os.environ["TERAIO_CACHE_DIR"] = "off"  # undone by the fixture
    assert main.main(["cache", "list"]) == 2


# ---- what is done with a plan that is found


class Followed:
    """Stands for the engine: what it was told to follow."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Plan | None]] = []

    def follow_plan(self, plan: Plan) -> None:
        self.told.append(("install", plan))

    def settle_plan(self, plan: Plan | None) -> None:
        self.told.append(("settle", plan))


def step(took_ns: int, size_bytes: int = 64) -> Step:
    """One call of two slots that takes so long; waiting at a slot is a part of it."""
    schedule = Schedule(
        "forward",
        (Buffer("w", "argument", size_bytes),),
        (Slot("enter", (0,), (READ,), 0), Slot("k", (), (), 0)),
    )
    call = Call(schedule, ("w",), (2_000, 3_000), (0, 0), (1_000, 0))
    return Step((call,), 1_000 + took_ns, (("w", "weight", size_bytes, True),), frozenset())


def order(it: Step) -> tuple[str, ...]:
    return tuple(call.schedule.identity_hash for call in it.calls)


def earlier(engine: Any, budget: int = 100, **options: Any) -> EarlierPlans:
    engine.residency = SimpleNamespace(budget_bytes=budget)
    return EarlierPlans(Settings.parse(options, {}), None, engine, torch.device("cpu"))


def kept_plan(took_ns: int, **options: Any) -> Plan:
    fingerprint = fingerprint_of_profile(lifetimes.profile_of_steps([step(took_ns)], "run"))
    plan = replace(PLAN, fingerprint=fingerprint, predicted=Predicted(took_ns))
    earlier(Followed(), **options).save_plan(plan)
    return plan


def test_a_kept_plan_is_followed_at_once_and_settled_when_it_keeps_its_promise(folder: Path) -> None:
    plan, engine = kept_plan(10_000), Followed()
    plans = earlier(engine)
    assert [plans.follow_if_known(order(step(1)), step(ns)) for ns in (90_000, 50_000, 11_400)] == [True] * 3
    assert engine.told == [("install", plan), ("settle", None)]


@pytest.mark.parametrize("took_ns", [11_600, 8_400])
def test_drift_beyond_15_percent_is_planned_again_once(
    took_ns: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, engine = kept_plan(10_000), Followed()
    plans = earlier(engine)
    with caplog.at_level(logging.INFO, "teraio"):
        turns = [
            plans.follow_if_known(order(step(1)), step(ns))
            for ns in (90_000, 50_000, took_ns, 90_000, 10_000)
        ]
    assert turns == [True, True, False, False, False]  # measured from now on, whatever comes
    assert engine.told == [("install", plan)]
    assert len([r for r in caplog.records if "measured and planned again" in r.getMessage()]) == 1


def test_a_new_plan_is_on_trial_too(folder: Path) -> None:
    engine, same = Followed(), order(step(1))
    plan = replace(
        PLAN,
        fingerprint=fingerprint_of_profile(lifetimes.profile_of_steps([step(1)], "run")),
        predicted=Predicted(10_000),
    )
    plans = earlier(engine)
    assert plans.put_on_trial(same, plan)
    assert plans.follow_if_known(same, step(90_000)) and plans.follow_if_known(same, step(10_100))
    assert engine.told == [("settle", None)]
    plans = earlier(engine)
    assert plans.put_on_trial(same, plan)
    assert plans.follow_if_known(same, step(90_000)) and not plans.follow_if_known(same, step(12_000))
    assert not plans.put_on_trial(same, plan)  # the second plan stays
    assert not earlier(engine).put_on_trial(same, replace(plan, moves=()))
    assert not earlier(engine, profile="x.json").put_on_trial(same, plan)


def test_a_step_that_turns_out_to_be_another_gets_no_foreign_plan(folder: Path) -> None:
    plan, engine = kept_plan(10_000), Followed()
    plans, same = earlier(engine), order(step(1))
    assert plans.follow_if_known(same, step(10_000)) and plans.follow_if_known(same, step(10_000))
    assert not plans.follow_if_known(same, step(10_000, size_bytes=128))
    assert engine.told[0] == ("install", plan)
    assert engine.told[1][1] is not None and engine.told[1][1].moves == ()


def test_where_a_step_leaves_the_plan_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept_plan(10_000)
    plans, alike = earlier(Followed()), step(10_000)
    other = step(10_000, size_bytes=128)
    longer = replace(alike, calls=(*alike.calls, *other.calls))
    with caplog.at_level(logging.INFO, "teraio"):
        assert not plans.follow_if_known(order(other), other)  # nothing was followed yet
        assert plans.follow_if_known(order(alike), alike)
        for _ in range(3):
            assert not plans.follow_if_known(order(longer), longer)
            assert not plans.follow_if_known(order(other), other)  # does not begin alike
    (line,) = [r.getMessage() for r in caplog.records if "left the plan" in r.getMessage()]
    assert "after 1 call, where it has another forward" in line


def test_a_step_is_another_one_by_everything_but_its_times() -> None:
    """A plan's ticks mean something only for the same kernels, tensors and uses."""
    kernels = (Kernel("a", 0, 10), Kernel("b", 0, 10), Kernel("c", 1, 10))
    one, two = Tensor("x", "weight", 64, True, (0, 2), ()), Tensor("y", "grad", 64, False, (2,), (1,))
    here = Profile("run", 30, kernels, (one, two))
    assert fingerprint_of_profile(here) == fingerprint_of_profile(
        replace(here, name="again", step_ns=99, kernels=tuple(replace(k, duration_ns=33) for k in kernels))
    )
    changes: tuple[dict[str, Any], ...] = (
        {"name": "z"},
        {"kind": "state"},
        {"size_bytes": 65},
        {"persistent": False},
        {"reads": (1, 2)},
        {"writes": (2,)},
    )
    tensors = [replace(one, **change) for change in changes]
    others = [
        *(replace(here, tensors=(other, two)) for other in tensors),
        *(replace(here, kernels=(*kernels[:2], other)) for other in (Kernel("d", 1, 10), Kernel("c", 0, 10))),
        replace(here, kernels=kernels[:2]),
        replace(here, kernels=(kernels[1], kernels[0], kernels[2])),
        replace(here, tensors=(one,)),
    ]
    assert len({fingerprint_of_profile(other) for other in (here, *others)}) == 1 + len(others)


def test_other_options_budgets_and_wishes_find_nothing(folder: Path) -> None:
    kept_plan(10_000)
    same, it = order(step(1)), step(10_000)
    assert earlier(Followed(), budget=111).follow_if_known(same, it)  # 100 is 9/10 of it
    for budget in (99, 112):
        assert not earlier(Followed(), budget=budget).follow_if_known(same, it)
    wishes: list[dict[str, Any]] = [
        {"keep": "w*"},
        {"planner": "greedy"},
        {"memory": "90B"},
        {"profile": "x.json"},
    ]
    for options in wishes:
        assert not earlier(Followed(), **options).follow_if_known(same, it)
    assert not earlier(Followed()).follow_if_known(same, step(10_000, size_bytes=128))


def test_a_damaged_plan_is_said_once_and_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = kept_plan(10_000)
    (path,) = folder.iterdir()
    path.write_text('{"format":"teraio-plan","version":1')
    plans = earlier(engine := Followed())
    for _ in range(3):
        assert not plans.follow_if_known(order(step(1)), step(10_000))
    (line,) = [r.getMessage() for r in caplog.records if "of an earlier run is not used" in r.getMessage()]
    assert path.name in line
    plans.save_plan(plan)
    assert earlier(engine).follow_if_known(order(step(1)), step(10_000))


# ---- two processes that train


def train() -> tuple[list[list[Any]], str]:
    ran = forked(tree.SUPPORT / "cache_train.py")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


def test_a_second_process_follows_the_first_ones_plan_from_its_second_step_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERAIO_PLANNER")  # the default is what most runs have
    first, log = train()
    assert len(re.findall("planned by auto", log)) == 1
    assert [moves for _, moves, _ in first][:4] == [0] * 4  # the first step, and three that were measured
    assert first[4][1] > 0
    assert len(PlanCache(folder).entries()) == 1
    second, log = train()
    assert "following the plan of an earlier run" in log
    assert log.index("following the plan") < log.find("measured step") % len(log)
    assert second[0][1] == 0 < second[1][1]
    assert [loss for loss, _, _ in first] == [loss for loss, _, _ in second]
