"""Tests of the scripts that measure on a GPU. The tests use jobs that need no GPU.

The scripts run only once, on a machine where nobody can repair them. A failing job must therefore not harm
other jobs. Every wait needs a limit, and every job needs a row with its result.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tree

GPU = tree.ROOT / "benchmarks" / "gpu"
sys.path.insert(0, str(GPU))

import fourteen  # noqa: E402
import rows  # noqa: E402
import trainings  # noqa: E402
from jobs import Crew, Ended, Job, tail  # noqa: E402

FAR_S = 60.0


def job(name: str, code: str, limit_s: float = 20.0, **settings: Any) -> Job:
    """Return a job that runs the Python lines in `code`.

    In `code`, a call of `result(...)` writes the job's result file.
    """
    begin = "import json, os, sys, time, signal, subprocess\n"
    begin += "result = lambda **found: open(os.environ['RESULT'], 'w').write(json.dumps(found))\n"
    return Job(name, (sys.executable, "-c", begin + code), limit_s, least_s=0.1, **settings)


def run(folder: Path, jobs: list[Job], seconds: float = FAR_S, **settings: Any) -> dict[str, Ended]:
    found: dict[str, Ended] = {}

    def on_end(ended: Ended) -> list[Job]:
        found[ended.job.name] = ended
        return []

    Crew(folder, on_end).run(jobs, time.monotonic() + seconds, **settings)
    return found


def test_job_past_its_limit_is_killed_with_its_children_and_leaves_its_stack(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
child = subprocess.Popen(["sleep", "600"])
open({str(pid)!r}, "w").write(str(child.pid))
result(losses=["0x1p0"])
def hangs(): time.sleep(600)
hangs()
"""
    hangs = job("hangs", code, limit_s=1.0, environment=(("PYTHONFAULTHANDLER", "1"),))
    begun = time.monotonic()
    found = run(tmp_path, [hangs, job("other", "result(ended=True)")], most=2)
    assert time.monotonic() - begun < 15
    assert found["hangs"].why == "past its limit" and not found["hangs"].in_order
    # The result that was written before the kill is kept.
    assert found["hangs"].result == {"losses": ["0x1p0"]}
    assert "in hangs" in found["hangs"].tail
    assert found["other"].in_order
    ends_s = time.monotonic() + 10
    while alive(pid.read_text()) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not alive(pid.read_text())


def alive(pid: str) -> bool:
    """Return True if the process runs.

    A dead process has an entry in /proc until its parent waits for it.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_job_that_ignores_signals_is_killed(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(600)"
    found = run(tmp_path, [job("stubborn", code, limit_s=1.0)])
    assert found["stubborn"].code == -9 and found["stubborn"].seconds < 10


@pytest.mark.parametrize(
    "code", ["os.kill(os.getpid(), signal.SIGSEGV)", "sys.exit(3)", "raise MemoryError", "result(losses=[])"]
)
def test_failing_job_does_not_affect_other_jobs(tmp_path: Path, code: str) -> None:
    found = run(tmp_path, [job("dies", code), job("next", "result(ended=True)")])
    assert not found["dies"].in_order and found["next"].in_order


def test_missing_command_is_recorded_as_a_failed_job(tmp_path: Path) -> None:
    found = run(tmp_path, [Job("absent", ("no-such-command-at-all",), 5), job("next", "result(ended=True)")])
    assert found["absent"].code == 127 and found["next"].in_order


def test_stage_ends_in_time_and_records_jobs_that_did_not_run(tmp_path: Path) -> None:
    begun = time.monotonic()
    found = run(
        tmp_path, [job("long", "time.sleep(600)", 300.0), job("never", "result(ended=True)")], seconds=1.5
    )
    assert time.monotonic() - begun < 12
    assert found["long"].why == "past its limit" and found["never"].why == "no time left"


def test_jobs_share_the_card_and_a_large_one_is_not_overtaken(tmp_path: Path) -> None:
    """Run jobs of 3, 9, 3 and 1 GiB on a card of 4 GiB.

    Two jobs of 3 GiB do not fit together. The job of 9 GiB runs alone.
    """
    code = "began = time.time(); time.sleep(0.3); result(ended=True, began=began, over=time.time())"
    sizes = {"a": 3.0, "large": 9.0, "b": 3.0, "c": 1.0}
    found = run(tmp_path, [job(name, code, gib=gib) for name, gib in sizes.items()], most=4, gib=4.0)
    spans = {name: (ended.result["began"], ended.result["over"]) for name, ended in found.items()}
    assert spans["a"][1] <= spans["large"][0] and spans["large"][1] <= spans["b"][0]
    assert spans["c"][0] < spans["b"][1], "1 and 3 GiB fit together"


def test_job_waits_for_its_prerequisites(tmp_path: Path) -> None:
    order: list[str] = []

    def on_end(ended: Ended) -> list[Job]:
        order.append(ended.job.name)
        return [job("third", "result(ended=True)")] if ended.job.name == "first" else []

    jobs = [job("second", "result(ended=True)", after=("first",)), job("first", "time.sleep(0.3)")]
    Crew(tmp_path, on_end).run(jobs, time.monotonic() + FAR_S, most=3)
    assert order[0] == "first" and sorted(order[1:]) == ["second", "third"]


def test_tail_reads_a_log_with_any_bytes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100_000 + b"\xff\xfe end")
    assert tail(log).endswith(" end") and len(tail(log)) < 20_000
    assert tail(tmp_path / "none") == ""


# ---- rows of results


def ended(name: str, losses: list[float], memory: int | None = None, peak: int = 90, **more: Any) -> Ended:
    asked = {"inner": "eager", "batch": 2, "length": 8} | ({"memory": memory} if memory else {})
    steps = [{"phase": "planned", "peak_bytes": peak, "reserved_bytes": peak + 7}] * len(losses)
    found = {"losses": [loss.hex() for loss in losses], "steps": steps, "ended": True, **more}
    return Ended(Job(name, ("true",), 1, asked=asked), 0, 1.0, "ended", found)


def test_losses_are_compared_only_if_two_plain_runs_are_equal() -> None:
    plain, twice, ours = (ended(name, [1.0, 2.0, 3.0]) for name in ("plain", "again", "ours"))
    other, moved = ended("other", [1.0, 2.0, 3.5]), ended("ours", [1.0, 2.5], memory=100)
    assert rows.compared(ours, plain, twice)["equal"] is True
    assert rows.compared(moved, plain, twice)["equal"] is False
    assert rows.compared(moved, plain, twice)["losses_apart"] == pytest.approx(0.2)
    assert rows.compared(moved, plain, twice)["budget_of_peak"] == pytest.approx(100 / 90, abs=1e-4)
    row = rows.compared(ours, plain, other)
    assert row["equal"] is None and "differs from itself" in row["not compared"]
    assert rows.compared(ended("ours", []), plain, twice)["equal"] is None
    assert rows.compared(ours, None, None)["equal"] is None
    assert rows.compared(ours, plain, None)["plain_twice"] == "not known"


def test_peak_beyond_the_budget_is_reported_in_bytes() -> None:
    assert rows.within(ended("ours", [1.0], memory=90)) is True
    assert rows.within(ended("ours", [1.0], memory=89)) is False
    assert rows.run_row(ended("ours", [1.0], memory=80))["over_bytes"] == 10
    assert rows.within(ended("plain", [1.0])) is None and rows.within(ended("ours", [], memory=80)) is None


def test_speed_row_has_the_prediction_and_the_bound() -> None:
    stats = {"bound_ns": 1_000_000_000, "predicted_step_ns": 1_600_000_000, "step_stall_ns": 5}
    run = ended("large 40%", [1.0] * 4, 100, seconds=[9.0, 2.0, 2.0, 4.0], first_measured=1, stats=stats)
    alone = ended("large plain", [1.0] * 4, seconds=[8.0, 1.0, 1.0, 1.0], first_measured=1)
    row = rows.speed_row(run, alone)
    assert (row["step_s"], row["over_plain"], row["over_bound"], row["over_predicted"]) == (
        2.0,
        2.0,
        2.0,
        1.25,
    )
    assert row["tokens_per_s"] == 8.0 and row["same_losses"] and row["reserved_bytes"] == 97
    assert rows.speed_row(ended("large 25%", []), alone)["step_s"] is None


# ---- whole runs, with a training script that trains nothing

TRAINEE = """
import json, os, sys
asked = json.loads(sys.argv[1])
found = {"losses": ["0x1.8p0"] * 5, "seconds": [0.1] * 5, "first_measured": 3, "stats": {"bound_ns": 9}}
peak = min(asked.get("memory", 10**9), asked.get("cap", 10**9))
found["steps"] = [{"phase": "planned", "peak_bytes": peak, "reserved_bytes": peak}] * 5
way = asked["way"] + " " + asked.get("inner", "inductor")
if asked.get("cap") and asked["way"] == "plain":
    found["said"] = "CUDA out of memory"
elif os.environ.get("BREAKS") == "budget" and asked.get("memory", 10**9) < 10**6:
    found = {"error": "BudgetError", "said": "the step needs more"}
elif os.environ.get("BREAKS") == "within" and "memory" in asked:
    found["steps"][0] = {"peak_bytes": asked["memory"] + 1}
if os.environ.get("BREAKS") == "bits" and way == "teraio eager":
    found["losses"] = ["0x1.8p0", "0x1.9p0"]
ok = "error" not in found and "said" not in found
open(os.environ["RESULT"], "w").write(json.dumps({**found, "ended": True} if ok else found))
sys.exit(0 if ok else 1)
"""
SMOKE = """
import json, os, sys
found = {"machine": {"card": "none", "card_free_bytes": 80 << 30, "torch": "2"}, "ended": True}
found["ok"] = "BREAKS_SMOKE" not in os.environ
open(os.environ["RESULT"], "w").write(json.dumps(found))
sys.exit(0)
"""


@pytest.fixture
def conducted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, text in (("TRAINEE", TRAINEE), ("SMOKE", SMOKE)):
        path = tmp_path / f"{name.lower()}.py"
        path.write_text(text)
        monkeypatch.setattr(trainings, name, str(path))
    for name in ("EAGER", "INDUCTOR"):
        small = getattr(trainings, name)
        monkeypatch.setattr(trainings, name, trainings.Small(small.asked, 2_000_000))

    def command(name: str, seconds: float = 60.0) -> tuple[int, list[dict[str, Any]]]:
        args = argparse.Namespace(command=name, out=tmp_path, kept=tmp_path, seconds=seconds, stale=False)
        conductor = fourteen.Conductor(args)
        code = conductor.first() if name == "first" else conductor.second()
        return code, [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]

    return command


def named(found: list[dict[str, Any]], what: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found if row["what"] == what}


def test_both_commands_leave_a_row_per_job(conducted: Any) -> None:
    code, found = conducted("first")
    run, equal, speed = (named(found, what) for what in ("run", "equal", "speed"))
    assert code == 0
    expected = {job.name for job in (*trainings.bits(), *trainings.probes(), trainings.sanitizer())}
    assert expected <= set(run) and {"large compile plain", "large compile teraio"} <= set(run)
    assert set(equal) == set(trainings.REFERENCES) and all(row["equal"] is True for row in equal.values())
    assert set(speed) == {"large plain", "large 40%", "large 25%", "large 60%"}
    assert speed["large 40%"]["over_plain"] == 1.0 and speed["large 40%"]["bound_ns"] == 9
    dated = [row for row in found if row["what"] not in ("nvidia-smi",)]
    assert all(row["date"] and row["card"] == "none" and row["versions"]["torch"] == "2" for row in dated)
    code, found = conducted("second")
    speed = named(found, "speed")
    assert code == 0 and set(speed) == {"large 40% host step"}
    assert speed["large 40% host step"]["over_plain"] == 1.0


def test_failed_smoke_test_stops_the_run(conducted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKS_SMOKE", "1")
    code, found = conducted("first")
    assert code == 3 and [row["what"] for row in found] == ["nvidia-smi", "smoke"]


def test_too_small_a_budget_is_tried_again_with_more(conducted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKS", "budget")
    found = conducted("first")[1]
    run, equal = named(found, "run"), named(found, "equal")
    assert run["eager 40% host"]["error"] == "BudgetError"
    assert equal["eager 40% host"]["equal"] is None and equal["eager 40% host + 128 MiB"]["equal"] is True
    assert run["eager 40% host + 128 MiB"]["in_order"]
    assert not any("MiB + 128 MiB" in name for name in run)
    again = named(conducted("second")[1], "run")
    assert "again eager 40% host" in again


def test_first_overrun_is_traced_slot_by_slot_once(conducted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKS", "within")
    run = named(conducted("first")[1], "run")
    assert run["eager 40% host"]["over_bytes"] == 1
    assert len([name for name in run if name.endswith(" slots")]) == 1


def test_different_losses_are_reported_and_run_again(conducted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKS", "bits")
    equal = named(conducted("first")[1], "equal")
    assert equal["eager 40% host"]["equal"] is False and equal["inductor 40% host"]["equal"] is True
    assert any(name.startswith("again ") for name in named(conducted("second")[1], "run"))


def test_commands_in_the_header_of_the_script_are_valid() -> None:
    """Check the names, time limits and lengths of the commands.

    A command must have fewer than 2000 characters. A longer command cannot be sent to the machine.
    """
    head = (GPU / "run.sh").read_text()
    commands = re.findall(r"^#     (bash benchmarks/gpu/run\.sh .*)$", head, re.MULTILINE)
    assert [command.split()[2] for command in commands] == ["first", "second"]
    assert [int(command.split()[-1]) for command in commands] == [560, 150]
    assert all(len(command) < 2000 for command in commands)
    for script in ("run.sh", "collect_wheels.sh", "made_from.sh"):
        subprocess.run(["bash", "-n", str(GPU / script)], check=True)


def test_script_without_wheels_names_the_script_that_collects_them(tmp_path: Path) -> None:
    command = ["bash", str(GPU / "run.sh"), "first", str(tmp_path), str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "collect_wheels.sh" in done.stderr
    assert not os.listdir(tmp_path)
