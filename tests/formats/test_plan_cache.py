"""Tests of the plan cache: files that other users may have changed, atomic writes by several processes, and
sessions that follow cached plans."""

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
from teraio.session import plan_reuse
from teraio.session.course import Order, Phase
from teraio.session.plan_reuse import EarlierPlans
from teraio.session.session import Session

LOOKS = 500
PLAN = Plan("f" * 32, "auto", 100, (), (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TERAIO_CACHE_DIR", str(tmp_path / "cache"))
    found = find_cache_folder()
    assert found == tmp_path / "cache" / "plans"
    return found


# ---- the cache's folder


def test_a_cached_plan_is_found_only_by_its_key(folder: Path) -> None:
    kept = PlanCache(folder)
    assert kept.read_plan("k", PLAN.fingerprint) == (None, "")
    assert kept.write_plan("k", PLAN) == ""
    assert kept.read_plan("k", PLAN.fingerprint) == (PLAN, "")
    assert kept.read_plan("l", PLAN.fingerprint) == (None, "")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert cache_key_of("ab", "c") != cache_key_of("a", "bc") != cache_key_of("ab", "c", "")


def test_files_that_others_could_have_written_are_refused_with_a_reason(folder: Path, tmp_path: Path) -> None:
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
    # The write replaces the symbolic link, and not the file to which the link points.
    assert kept.write_plan("k", PLAN) == "" and not path.is_symlink()
    assert kept.read_plan("k", PLAN.fingerprint) == (PLAN, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(folder: Path) -> None:
    kept = PlanCache(folder)
    kept.write_plan("k", PLAN)
    os.chown(folder / f"k{SUFFIX}", 12345, 12345)
    assert "belongs to another user (uid 12345)" in kept.read_plan("k", PLAN.fingerprint)[1]


def test_the_least_recently_used_plans_are_deleted(folder: Path) -> None:
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
    moves = PLAN.moves * 50  # many moves make the file long; their meaning is not checked
    until = time.monotonic() + 120  # a time limit, in case the file `stop` never appears
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
    assert [path.name for path in folder.iterdir()] == [f"k{SUFFIX}"]  # no temporary file is left


def test_compiled_extensions_have_a_folder_even_if_the_cache_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/tmp/x")
    for variable, folder in ("/tmp/y", "/tmp/y/built"), ("off", "/tmp/x/teraio/built"):
        monkeypatch.setenv("TERAIO_CACHE_DIR", variable)
        assert compiled_extension_folder() == Path(folder)


def test_the_cache_can_be_turned_off_and_moved() -> None:
    assert find_cache_folder({"TERAIO_CACHE_DIR": "off"}) is None
    assert find_cache_folder({"XDG_CACHE_HOME": "/tmp/x"}) == Path("/tmp/x/teraio/plans")
    assert find_cache_folder({}) == Path.home() / ".cache/teraio/plans"


def test_the_cache_command_lists_and_clears(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = PlanCache(folder)
    kept.write_plan("k", replace(PLAN, budget_bytes=2**30, predicted=Predicted(1_500_000_000)))
    (folder / "notes.txt").write_text("mine")
    assert main.main(["cache", "list"]) == 0
    printed = capsys.readouterr().out
    assert "1 plan kept" in printed and "1 GiB" in printed and "1.5 s per step" in printed
    assert main.main(["cache", "clear"]) == 0
    assert "1 plan cleared" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    os.environ["TERAIO_CACHE_DIR"] = "off"  # the fixture restores the variable
    assert main.main(["cache", "list"]) == 2


# ---- sessions that follow a cached plan


class Followed:
    """A stand-in for the engine. It only records each plan that the session passes to it."""

    def __init__(self, budget: int) -> None:
        self.orders: list[tuple[str, Plan | None]] = []
        self.residency = SimpleNamespace(budget_bytes=budget)
        self.tracker = SimpleNamespace(known={}, expected=SimpleNamespace(settled=False))

    def follow_plan(self, plan: Plan, order: Order = ()) -> None:
        self.orders.append(("install", plan))

    def settle_plan(self, plan: Plan | None, order: Order = ()) -> None:
        self.orders.append(("settle", plan))


def step(took_ns: int, size_bytes: int = 64) -> Step:
    """Return a step of one call with two slots. The step lasts `took_ns` and a stall of 1,000 ns."""
    schedule = Schedule(
        "forward",
        (Buffer("w", "argument", size_bytes),),
        (Slot("enter", (0,), (READ,), 0), Slot("k", (), (), 0)),
    )
    call = Call(schedule, ("w",), (2_000, 3_000), (0, 0), (1_000, 0))
    return Step((call,), 1_000 + took_ns, (("w", "weight", size_bytes, True),), frozenset())


def order(it: Step) -> tuple[str, ...]:
    return tuple(call.schedule.identity_hash for call in it.calls)


class Run:
    """A session with the stand-in for the engine. The session's planner always returns `plan`."""

    def __init__(self, budget: int = 100, plan: Plan | None = None, **options: Any) -> None:
        engine: Any = Followed(budget)
        self.engine = engine
        asked = Settings.parse({"warmup": 9, **options}, {})
        self.earlier = EarlierPlans(asked, None, self.engine, torch.device("cpu"))
        choice = SimpleNamespace(finish=lambda: plan)
        planning = SimpleNamespace(
            recompute_by_plan_file=lambda step: False,
            is_choosing=False,
            begin_choice=lambda profile, step: choice,
            advance_choice=lambda choice: True,
        )
        late = SimpleNamespace(
            follow_earlier_decision=lambda profile, fingerprint: False, end_step=lambda courses: None
        )
        self.session = Session.__new__(Session)
        vars(self.session).update(
            courses={},
            begun=True,
            names=None,
            options=asked,
            engine=self.engine,
            earlier=self.earlier,
            recomputation=SimpleNamespace(due=set()),
            planning=planning,
            late_choice=late,
        )

    def phase_after(self, measured: Step) -> Phase:
        """Add a measured step to the session. Return the phase of the step's course, which is its sequence of
        calls."""
        self.session.end_step(measured)
        return self.session.courses[order(measured)].phase


def kept_plan(took_ns: int, **options: Any) -> Plan:
    fingerprint = fingerprint_of_profile(lifetimes.profile_of_steps([step(took_ns)], "run"))
    plan = replace(PLAN, fingerprint=fingerprint, predicted=Predicted(took_ns))
    Run(**options).earlier.save_plan(plan)
    return plan


def test_kept_plan_is_followed_at_once_and_settled_when_steps_take_as_long_as_predicted(
    folder: Path,
) -> None:
    plan, run = kept_plan(10_000), Run()
    phases = [run.phase_after(step(ns)) for ns in (90_000, 50_000, 11_400)]
    assert phases == [Phase.TRIAL, Phase.TRIAL, Phase.PLANNED]
    assert run.engine.orders == [("install", plan), ("settle", None)]


@pytest.mark.parametrize("took_ns", [11_600, 8_400])
def test_step_that_drifts_beyond_15_percent_is_measured_and_planned_again_once(
    took_ns: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, run = kept_plan(10_000), Run()
    with caplog.at_level(logging.INFO, "teraio"):
        phases = [run.phase_after(step(ns)) for ns in (90_000, 50_000, took_ns, 90_000, 10_000)]
    assert phases == [Phase.TRIAL] * 2 + [Phase.MEASURING] * 3
    assert run.engine.orders == [("install", plan)]
    assert len([r for r in caplog.records if "measured and planned again" in r.getMessage()]) == 1


def test_new_plan_is_tried_once_and_its_successor_is_final(folder: Path) -> None:
    plan = replace(
        PLAN,
        fingerprint=fingerprint_of_profile(lifetimes.profile_of_steps([step(1)], "run")),
        predicted=Predicted(10_000),
    )
    run = Run(plan=plan, warmup=1)
    phases = [run.phase_after(step(ns)) for ns in (90_000, 20_000, 90_000, 10_100)]
    assert phases == [Phase.MEASURING, Phase.TRIAL, Phase.TRIAL, Phase.PLANNED]
    assert run.engine.orders == [("install", plan), ("settle", None)]
    run = Run(plan=plan, warmup=1)
    phases = [run.phase_after(step(ns)) for ns in (90_000, 20_000, 90_000, 12_000, 20_000)]
    assert phases == [Phase.MEASURING, Phase.TRIAL, Phase.TRIAL, Phase.MEASURING, Phase.PLANNED]
    assert run.engine.orders == [("install", plan), ("settle", plan)]


def test_new_plan_is_not_tried_without_moves_or_when_a_profile_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    plan = replace(PLAN, predicted=Predicted(10_000))
    for run in (
        Run(plan=replace(plan, moves=()), warmup=1),
        Run(plan=plan, warmup=1, profile=str(tmp_path / "x.json")),
    ):
        assert [run.phase_after(step(1)) for _ in range(2)] == [Phase.MEASURING, Phase.PLANNED]


def test_measured_step_of_a_planned_course_begins_anew(folder: Path) -> None:
    """Check that the session makes a new plan when it measures a planned step again.

    The session does this, for example, when the optimizer changes between device and host.
    """
    run = Run(warmup=1)
    phases = [run.phase_after(step(1)) for _ in range(4)]
    assert phases == [Phase.MEASURING, Phase.PLANNED] * 2


def test_steps_are_ignored_while_programs_are_compiled_anew(folder: Path) -> None:
    run = Run(warmup=1)
    run.session.recomputation.due.add("graph")
    for _ in range(3):
        run.phase_after(step(1))
    course = run.session.courses[order(step(1))]
    assert run.session.phase_of(course) is Phase.RECOMPILING and not course.steps


def test_step_that_turns_out_to_be_another_gets_no_foreign_plan(folder: Path) -> None:
    plan, run = kept_plan(10_000), Run()
    for _ in range(2):
        assert run.phase_after(step(10_000)) is Phase.TRIAL
    course = run.session.courses[order(step(1))]
    # This step calls the same programs, but a tensor has another size.
    run.session._end_trial_by_step(course, step(10_000, size_bytes=128))
    assert course.phase is Phase.MEASURING
    assert run.engine.orders[0] == ("install", plan)
    assert run.engine.orders[1][1] is not None and run.engine.orders[1][1].moves == ()


def test_place_where_a_step_leaves_its_plan_is_reported_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept_plan(10_000)
    run, alike = Run(), step(10_000)
    other = step(10_000, size_bytes=128)
    longer = replace(alike, calls=(*alike.calls, *other.calls))
    with caplog.at_level(logging.INFO, "teraio"):
        # The session has not followed a plan before this step.
        assert run.phase_after(other) is Phase.MEASURING
        assert run.phase_after(alike) is Phase.TRIAL
        for _ in range(3):
            assert run.phase_after(longer) is Phase.MEASURING
            # The step `other` begins with a call that is not in the plan, so the session does not follow the
            # plan.
            assert run.phase_after(other) is Phase.MEASURING
    (line,) = [r.getMessage() for r in caplog.records if "differs from the planned step" in r.getMessage()]
    assert "after 1 call, by another forward" in line


def test_the_fingerprint_depends_on_everything_but_times() -> None:
    """Compare fingerprints of changed profiles.

    A plan's ticks are valid only for the same kernels, tensors and uses.
    """
    kernels = (Kernel("a", 0, 10), Kernel("b", 0, 10), Kernel("c", 1, 10))
    one, two = Tensor("x", "weight", 64, True, (0, 2), ()), Tensor("y", "grad", 64, False, (2,), (1,))
    first = Profile("run", 30, kernels, (one, two))
    assert fingerprint_of_profile(first) == fingerprint_of_profile(
        replace(first, name="again", step_ns=99, kernels=tuple(replace(k, duration_ns=33) for k in kernels))
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
        *(replace(first, tensors=(other, two)) for other in tensors),
        *(replace(first, kernels=(*kernels[:2], k)) for k in (Kernel("d", 1, 10), Kernel("c", 0, 10))),
        replace(first, kernels=kernels[:2]),
        replace(first, kernels=(kernels[1], kernels[0], kernels[2])),
        replace(first, tensors=(one,)),
    ]
    assert len({fingerprint_of_profile(other) for other in (first, *others)}) == 1 + len(others)


def test_plan_for_other_options_or_another_budget_is_not_followed(folder: Path) -> None:
    kept_plan(10_000)
    it = step(10_000)
    # The plan's budget is 100; a plan is followed from 9/10 of the run's budget on.
    assert Run(budget=111).phase_after(it) is Phase.TRIAL
    for budget in (99, 112):
        assert Run(budget=budget).phase_after(it) is Phase.MEASURING
    wishes: list[dict[str, Any]] = [
        {"keep": "w*"},
        {"planner": "greedy"},
        {"memory": "90B"},
        {"profile": "x.json"},
    ]
    for options in wishes:
        assert Run(**options).phase_after(it) is Phase.MEASURING
    assert Run().phase_after(step(10_000, size_bytes=128)) is Phase.MEASURING


def test_plan_of_a_rank_alone_is_not_followed_by_ranks_that_share_a_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_plan(10_000)
    it = step(10_000)
    monkeypatch.setattr(plan_reuse, "count_ranks", lambda: 2)
    assert Run().phase_after(it) is Phase.MEASURING
    kept_plan(10_000)
    assert Run().phase_after(it) is Phase.TRIAL
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Run().phase_after(it) is Phase.MEASURING


def test_damaged_plan_is_reported_once_and_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = kept_plan(10_000)
    (path,) = folder.iterdir()
    path.write_text('{"format":"teraio-plan","version":1')
    run = Run()
    for _ in range(3):
        assert run.phase_after(step(10_000)) is Phase.MEASURING
    (line,) = [r.getMessage() for r in caplog.records if "of an earlier run is not used" in r.getMessage()]
    assert path.name in line
    run.earlier.save_plan(plan)
    assert Run().phase_after(step(10_000)) is Phase.TRIAL


# ---- two processes that train one after the other


def train() -> tuple[list[list[Any]], str]:
    ran = forked(tree.SUPPORT / "cache_train.py")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


def test_a_second_process_follows_the_cached_plan_from_its_second_step_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERAIO_PLANNER")  # most users train with the default planner
    first, log = train()
    assert len(re.findall("planned by auto", log)) == 1
    # The first step and three measured steps make no moves.
    assert [moves for _, moves, _ in first][:4] == [0] * 4
    assert first[4][1] > 0
    assert len(PlanCache(folder).entries()) == 1
    second, log = train()
    assert "following the plan of an earlier run" in log
    assert log.index("following the plan") < log.find("measured step") % len(log)
    assert second[0][1] == 0 < second[1][1]
    assert [loss for loss, _, _ in first] == [loss for loss, _, _ in second]
