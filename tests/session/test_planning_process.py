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
from children import forked
from torch import nn

import teraio
from teraio.errors import PlanError
from teraio.passes.planner import planner_process
from teraio.passes.planner.planner_process import PlannerProcess
from teraio.session import plan_choice, plan_reuse, session
from teraio.session.plan_choice import Ask
from teraio.session.planning import Planning

WIDTH, LAYERS, SLEEP_S = 256, 6, 1.0

pytestmark = pytest.mark.usefixtures("nothing_left")


# ---- the process alone


def answer(call: partial[Any]) -> Any:
    return PlannerProcess(call).result()


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
    running = PlannerProcess(partial(time.sleep, 60))
    assert not running.has_ended()
    running.cancel()
    assert children() == []


def test_ctrl_c_while_waiting_ends_the_process() -> None:
    running = PlannerProcess(partial(planner_calls.kill_parent_then_sleep, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        running.result()
    assert children() == []


def test_a_forked_child_does_not_end_the_process_of_its_parent() -> None:
    running = PlannerProcess(partial(planner_calls.slept, 0.5))
    if not (child := os.fork()):
        running.cancel()
        os._exit(0)
    os.waitpid(child, 0)
    assert running.result() == 0.5


def test_the_process_ends_soon_after_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import os, time\nfrom functools import partial\n"
        "from teraio.passes.planner.planner_process import PlannerProcess\n"
        "PlannerProcess(partial(time.sleep, 60))\n"
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
        }
        self.compiled: Any = torch.compile(self.model, backend="teraio", options={**asked, **options})
        self.number = 0

    def step(self) -> str:
        """Train one step. Return the phase of the next step."""
        self.number += 1
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
    ask: Callable[..., Ask] = Planning._ask_for_plan

    def slow(self: Planning, *given: Any) -> Ask:
        asked.append(time.monotonic())
        it = ask(self, *given)
        return Ask(it.what, it.limit_s, partial(planner_calls.after_sleep, SLEEP_S, it.call))

    monkeypatch.setattr(Planning, "_ask_for_plan", slow)
    yield asked


def trained_plainly(steps: int) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TERAIO_DISABLE", "1")
        plain = Training()
        for _ in range(steps):
            plain.step()
    torch._dynamo.reset()
    return plain.bits()


def test_steps_go_on_while_the_planner_works(no_drift: None, slow_planner: list[float]) -> None:
    training, longest_s, beside = Training(), 0.0, 0
    phase = ""
    while phase != "planned":
        began_s = time.monotonic()
        phase = training.step()
        if slow_planner and phase == "measuring":
            beside += 1
            if beside > 1:  # the first such step began before the ask
                longest_s = max(longest_s, time.monotonic() - began_s)
        assert beside < 10_000
    assert beside > 5 and longest_s < SLEEP_S
    assert time.monotonic() - slow_planner[0] > SLEEP_S and len(slow_planner) == 1
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


def test_the_trainer_imports_no_solver(tmp_path: Path) -> None:
    """Run a planner that imports OR-Tools. The forked script does not inherit the imports of other tests."""
    path = tmp_path / "train.py"
    path.write_text(
        "import sys\nsys.path[:0] = sys.argv[1:]\nfrom test_planning_process import Training\n"
        "training = Training(planner='ilp', plan_time='2s')\n"
        "training.steps_until_planned()\nprint('ortools' in sys.modules)\n"
    )
    ran = forked(path, str(Path(__file__).parent), str(Path(planner_calls.__file__).parent))
    assert (ran.returncode, ran.stdout) == (0, "False\n") and "planned by ilp" in ran.stderr, ran.stderr


def test_reset_ends_the_planner(slow_planner: list[float], caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with caplog.at_level(logging.INFO, "teraio"):
        while not children():
            training.step()
        teraio.reset()
    assert children() == []
    assert "the planner's process is stopped before it has made a plan" in caplog.text


def test_set_memory_discards_the_answer_for_the_old_budget(no_drift: None, slow_planner: list[float]) -> None:
    training = Training()
    while not children():
        training.step()
    teraio.set_memory("12MiB")
    assert len(slow_planner) == 2 and children() == []
    assert training.step() == "planned"
    assert session.SESSION is not None
    (course,) = session.SESSION.courses.values()
    assert course.phase.value == "planned" and course.choice is None


def test_a_dead_planner_leaves_a_training_without_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = Ask("planning by greedy", 30.0, partial(planner_calls.kill_self, signal.SIGKILL))
    monkeypatch.setattr(Planning, "_ask_for_plan", lambda *given: dead)
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
    """A step with two backwards and a step with one alternate. At no time are there two planner processes."""
    training = Training()
    most = 0
    until_s = time.monotonic() + 60
    planned: set[str] = set()
    while len(planned) < 2:
        assert time.monotonic() < until_s
        kind = "two" if training.number % 2 else "one"
        if kind == "two":
            training.compiled(torch.ones(16, WIDTH)).square().sum().backward()
        training.step()
        most = max(most, len(children()))
        assert session.SESSION is not None
        courses = session.SESSION.courses.values()
        planned = {" ".join(it.order) for it in courses if it.phase.value in ("trial", "planned")}
    assert most == 1 and len(slow_planner) == 2
    assert slow_planner[1] - slow_planner[0] > SLEEP_S
