"""Checks of a training on a GPU with files: profiles, plans made without the GPU, replayed plans, and
timelines.

Each training runs in its own process.

python check_offline.py '{"plan": "run.plan.json"}'     runs one; prints losses, digest and phases as JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from small_llama import Training, plain

from teraio.cli import main

STEPS = 10


def run(options: dict[str, Any], **variables: str) -> dict[str, Any]:
    command = [sys.executable, __file__, json.dumps(options)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    expected = plain(inner="eager")
    assert found["losses"] == expected["losses"] and found["digest"] == expected["digest"], options
    assert max(found["peaks"]) <= options["memory"], (found["peaks"], options)
    return found


def budget() -> int:
    return int(max(plain(inner="eager")["peaks"]) * 0.4)


def check_a_profile_is_planned_offline_and_replayed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / f"run.{name}.json") for name in ("profile", "timeline", "plan")}
        machine, page = str(Path(folder) / "here.machine.json"), Path(folder) / "report.html"
        options = {"memory": budget(), "host_memory": "512MiB"}
        measured = run({**options, "profile": files["profile"], "timeline": files["timeline"]})
        assert "planned" in measured["phases"], measured["phases"]
        assert main.main(["doctor", "--seconds", "0.2", "-o", machine]) in (0, 1)
        memory = ["--memory", str(options["memory"])]
        plan = ["plan", files["profile"], "--machine", machine, *memory, "-o", files["plan"]]
        assert main.main(plan) == 0
        assert main.main(["explain", files["plan"], files["profile"], "--machine", machine]) == 0
        assert main.main(["report", files["timeline"], "--profile", files["profile"], "-o", str(page)]) == 0
        assert page.stat().st_size > 10_000
        replayed = run({**options, "plan": files["plan"]})
        assert set(replayed["phases"][1:]) == {"planned"}, replayed["phases"]
        return {"phases": replayed["phases"], "planned_moves": replayed["planned_moves"]}


def check_a_later_run_takes_the_plan_of_an_earlier_one() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"memory": budget(), "host_memory": "512MiB"}
        first = run(options, TERAIO_CACHE_DIR=folder)
        later = run(options, TERAIO_CACHE_DIR=folder)
        assert first["phases"][1] == "measuring", first["phases"]
        assert set(later["phases"][1:]) == {"planned"}, later["phases"]
        return {"phases": later["phases"], "planned_moves": later["planned_moves"]}


SAMPLE = {"check_a_profile_is_planned_offline_and_replayed"}


if __name__ == "__main__":
    import standin  # noqa: F401

    import teraio

    made = Training(options=json.loads(sys.argv[1])).train(STEPS)
    print(
        json.dumps(
            {**made.results(), "phases": made.phases, "planned_moves": teraio.stats()["planned_moves"]}
        )
    )
