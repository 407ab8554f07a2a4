"""Tests of the planner in a process of its own: its answers, its failures, and the training beside it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import planner_calls
import pytest
import torch
from torch import nn

import teraio
from teraio.errors import PlanError
from teraio.passes.planner import planner_process
from teraio.passes.planner.planner_process import PlannerProcess
from teraio.passes.planner.problem import solvers
from teraio.session import plan_choice, plan_reuse, session
from teraio.session.plan_choice import Ask
from teraio.session.planning import Planning

WIDTH, LAYERS, SLEEP_S, LIMIT_S = 256, 6, 0.6, 30.0

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def same_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside other tests, a process of lower priority would hardly run.
    monkeypatch.setattr(planner_process, "NICE", 0)


# ---- the process alone


def answer(call: partial[Any]) -> Any:
    return PlannerProcess(call, LIMIT_S).result()


def test_an_answer_is_that_of_a_call_in_this_process() -> None:
    assert answer(partial(planner_calls.doubled, list(range(10**5)))) == [2 * n for n in range(10**5)]


def test_the_process_does_not_import_torch() -> None:
    assert answer(partial(planner_calls.imported_after_planners, ("torch", "teraio"))) == ["teraio"]


def test_log_lines_reach_the_trainer_and_printed_lines_do_not(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "teraio"):
        assert answer(partial(planner_calls.noisy, "from the planner")) == "done"
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [(logging.WARNING, "from the planner")]
    assert capfd.readouterr() == ("", "")


def test_an_error_of_the_planner_keeps_its_message() -> None:
    with pytest.raises(PlanError, match=r"^needs 3 bytes, has 2$"):
        answer(partial(planner_calls.refuse, "needs 3 bytes, has 2"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            partial(os._exit, 7),
            "ended with exit code 7 and without a plan; with the option planning='inline'",
        ),
        (partial(planner_calls.kill_self, signal.SIGKILL), "was killed by SIGKILL"),
        (partial(planner_calls.fail, "not a TeraioError"), "exit code 1 .*AssertionError: not a TeraioError"),
    ],
)
def test_a_dead_process_is_a_plan_error_with_the_reason(call: partial[Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        answer(call)


def test_cancel_ends_the_process() -> None:
    running = PlannerProcess(partial(time.sleep, 60), LIMIT_S)
    assert not running.has_ended()
    running.cancel()
    assert children() == []


def test_ctrl_c_while_waiting_ends_the_process() -> None:
    running = PlannerProcess(partial(planner_calls.kill_parent_then_sleep, signal.SIGINT), LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        running.result()
    assert children() == []


def test_a_process_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_process, "PATIENCE", (1.0, 0.2))
    running = PlannerProcess(partial(time.sleep, 60), 0.1)
    with pytest.raises(PlanError, match="was killed after 0 s"):
        running.result()
    assert children() == []


def test_paths_that_python_ignores_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert answer(partial(planner_calls.doubled, [1])) == [2]


def test_a_forked_child_does_not_end_the_process_of_its_parent() -> None:
    running = PlannerProcess(partial(planner_calls.slept, 0.5), LIMIT_S)
    if not (child := os.fork()):
        running.cancel()
        os._exit(int(running.has_ended()))
    assert os.waitpid(child, 0)[1] == 0
    assert running.result() == 0.5


def test_the_process_ends_soon_after_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import os, time\nfrom functools import partial\n"
        "from teraio.passes.planner.planner_process import PlannerProcess\n"
        "PlannerProcess(partial(time.sleep, 60), 30)\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    until_s = time.monotonic() + 20
    while (left := Path("/proc", ended.stdout.strip(), "cmdline")).exists() and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not left.exists()


# ---- a training beside it


def children() -> list[str]:
    """Return the identifiers of this process's planner processes."""
    found = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    return [it for it in found if planner_process.START in Path("/proc", it, "cmdline").read_text()]


class Training:
    """A training under a budget, whose planner works in a process of its own."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        asked: dict[str, Any] = {
            "inner": "eager",
            "memory": "10MiB",
            "warmup": 1,
            "planner": "greedy",
            "planning": "process",
            "updates": "step",
        }
        self.compiled: Any = torch.compile(self.model, backend="teraio", options={**asked, **options})
        self.number = 0

    def step(self) -> str:
        """Train one step. Return the phase of the next step."""
        self.number += 1
        if self.number > 3:
            time.sleep(0.02)  # leave time of the cores to the planner, which other tests slow down
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(self.number))
        self.compiled(x).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return str(teraio.stats().get("phase"))

    def steps_until_planned(self, most_s: float = 60) -> int:
        until_s = time.monotonic() + most_s
        while self.step() != "planned":
            assert time.monotonic() < until_s
        return self.number

    def steps_until_planner_runs(self) -> None:
        while not children():
            assert self.step() != "planned"

    def bits(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.fixture
def no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, drift would end the trial of a plan.
    monkeypatch.setattr(plan_reuse, "DRIFT_PERCENT", 10**9)


@pytest.fixture
def slow_planner(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Let each plan take `SLEEP_S` longer. Yield the times at which the session asked for a plan."""
    asked: list[float] = []
    ask: Callable[..., Ask] = Planning.ask_for_plan

    def slow(self: Planning, *given: Any) -> Ask:
        asked.append(time.monotonic())
        it = ask(self, *given)
        return Ask(it.what, it.limit_s, partial(planner_calls.after_sleep, SLEEP_S, it.call))

    monkeypatch.setattr(Planning, "ask_for_plan", slow)
    yield asked


def trained_plainly(steps: int) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TERAIO_DISABLE", "1")
        plain = Training()
        for _ in range(steps):
            plain.step()
    torch._dynamo.reset()
    return plain.bits()


def test_steps_go_on_while_the_planner_works(
    no_drift: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The planner answers after eight steps beside it, or after 20 s, if a step waits for the answer."""
    may_answer, ask = tmp_path / "may answer", Planning.ask_for_plan

    def held(self: Planning, *given: Any) -> Ask:
        it = ask(self, *given)
        return Ask(it.what, it.limit_s, partial(planner_calls.after_file, may_answer, 20.0, it.call))

    monkeypatch.setattr(Planning, "ask_for_plan", held)
    training = Training()
    training.steps_until_planner_runs()
    for _ in range(8):
        assert training.step() == "measuring"
        assert len(children()) == 1
    may_answer.touch()
    training.steps_until_planned()
    assert session.SESSION is not None
    (course,) = session.SESSION.courses.values()
    # The step that has just ended did not follow the plan, so it is no part of the trial.
    assert course.phase.value == "trial" and course.steps == []
    for _ in range(4):
        assert training.step() == "planned"
    assert teraio.stats()["planned_moves"] > 0 and children() == []
    bits = training.bits()
    teraio.reset()
    torch._dynamo.reset()
    plain = trained_plainly(training.number)
    assert all(torch.equal(one, other) for one, other in zip(bits, plain, strict=True))


def test_inline_the_next_step_waits(no_drift: None, slow_planner: list[float]) -> None:
    training = Training(planning="inline")
    assert training.steps_until_planned() == 3
    assert time.monotonic() - slow_planner[0] > SLEEP_S


def test_the_trainer_imports_no_solver(
    no_drift: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Run a planner that needs OR-Tools. Only this process fails if it imports OR-Tools."""
    monkeypatch.setattr(
        solvers, "is_ortools_installed", partial(planner_calls.fail, "imported by the trainer")
    )
    with caplog.at_level(logging.INFO, "teraio"):
        Training(planner="ilp", plan_time="1s").steps_until_planned()
    assert "planned by ilp" in caplog.text
    teraio.reset()
    with pytest.raises(AssertionError, match="imported by the trainer"):
        Training(planner="ilp", plan_time="1s", planning="inline").steps_until_planned()


def test_reset_ends_the_planner(slow_planner: list[float], caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with caplog.at_level(logging.INFO, "teraio"):
        training.steps_until_planner_runs()
        teraio.reset()
    assert children() == []
    assert "the planner's process is stopped before it has made a plan" in caplog.text


def test_set_memory_discards_the_answer_for_the_old_budget(no_drift: None, slow_planner: list[float]) -> None:
    training = Training()
    training.steps_until_planner_runs()
    teraio.set_memory("12MiB")
    assert len(slow_planner) == 2 and children() == []
    assert training.step() == "planned"
    assert session.SESSION is not None
    (course,) = session.SESSION.courses.values()
    assert course.phase.value == "planned" and course.choice is None


def test_an_interrupted_set_memory_plans_again(
    no_drift: None, slow_planner: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    training.steps_until_planner_runs()
    with monkeypatch.context() as patched:
        slow = Ask(
            "planning by greedy", LIMIT_S, partial(planner_calls.kill_parent_then_sleep, signal.SIGINT)
        )
        patched.setattr(Planning, "ask_for_plan", lambda *given: slow)
        with pytest.raises(KeyboardInterrupt):
            teraio.set_memory("12MiB")
    assert children() == []
    training.steps_until_planned()


@pytest.mark.parametrize("planning", ["process", "inline"])
def test_a_choice_that_is_interrupted_begins_again(
    no_drift: None, monkeypatch: pytest.MonkeyPatch, planning: str
) -> None:
    """Ctrl-C is pressed before the first ask, and after the answer."""
    interrupted: list[str] = []

    def once(name: str, it: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if name not in interrupted:
                interrupted.append(name)
                raise KeyboardInterrupt
            return it(*given)

        return call

    monkeypatch.setattr(Planning, "ask_for_plan", once("ask", Planning.ask_for_plan))
    monkeypatch.setattr(Planning, "_report_and_keep", once("report", Planning._report_and_keep))
    training, pressed, phase = Training(planning=planning), 0, ""
    until_s = time.monotonic() + 60
    while phase != "planned":
        assert time.monotonic() < until_s
        try:
            phase = training.step()
        except KeyboardInterrupt:
            pressed += 1
    assert (pressed, interrupted) == (2, ["ask", "report"]) and children() == []


def test_a_dead_planner_leaves_a_training_without_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = Ask("planning by greedy", 30.0, partial(planner_calls.kill_self, signal.SIGKILL))
    monkeypatch.setattr(Planning, "ask_for_plan", lambda *given: dead)
    training = Training()
    with caplog.at_level(logging.WARNING, "teraio"):
        until_s = time.monotonic() + 60
        while training.step() != "on demand":
            assert time.monotonic() < until_s
    (line,) = [r.getMessage() for r in caplog.records if "no plan" in r.getMessage()]
    assert "the planner's process was killed by SIGKILL" in line


def test_without_a_process_steps_wait_and_one_line_says_so(
    no_drift: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*given: Any, **named: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    plan_choice._warn_that_steps_wait.cache_clear()
    with caplog.at_level(logging.WARNING, "teraio"):
        training = Training()
        assert training.steps_until_planned() == 3
        teraio.set_memory("12MiB")
    assert caplog.text.count("no process for the planner ([Errno 11] Resource temporarily unavailable)") == 1


def test_two_kinds_of_steps_plan_one_after_the_other(no_drift: None, slow_planner: list[float]) -> None:
    """A step with two backwards and a step with one alternate. At no time are there two planner processes.

    No step beside a process counts as a measured step.
    """
    training = Training()
    most, until_s = 0, time.monotonic() + 60
    counts: dict[str, int] = {}
    planned: set[str] = set()
    while len(planned) < 2:
        assert time.monotonic() < until_s
        before, beside = counts, len(children())
        if training.number % 2:
            training.compiled(torch.ones(16, WIDTH)).square().sum().backward()
        training.step()
        assert session.SESSION is not None
        courses = {" ".join(order): it for order, it in session.SESSION.courses.items()}
        counts = {name: len(it.steps) for name, it in courses.items()}
        if beside and children():
            assert all(counts[name] in (0, count) for name, count in before.items())
        most = max(most, len(children()))
        planned = {name for name, it in courses.items() if it.phase.value in ("trial", "planned")}
    assert most == 1 and len(slow_planner) == 2
    assert slow_planner[1] - slow_planner[0] > SLEEP_S
