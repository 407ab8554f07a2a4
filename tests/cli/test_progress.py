"""Tests of progress output.

On a terminal, the output is one line that changes. If stderr is no terminal, the output has one line per
stage. A stage that ends soon prints no line.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Callable

import pytest
import toys

from teraio import progress
from teraio.cli import main
from teraio.passes.planner import planners
from teraio.passes.planner.problem import progress_lines
from teraio.progress import show_stage, tell_progress


class Terminal(io.StringIO):
    """A replacement for stderr that claims to be a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


Read = Callable[[], str]


@pytest.fixture
def err(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Read:
    """Turn progress on, and return a function that returns the new text on stderr.

    Without this fixture, a clock thread prints a stage that has run for some seconds. With it, a stage is
    printed when a test calls the function `look`, even if the stage has just begun.
    """
    monkeypatch.setattr(progress, "is_quiet", lambda: False)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", 60.0)
    return lambda: capsys.readouterr().err


def look() -> None:
    assert progress._LINE is not None
    progress._LINE.show_if_due()


def test_stderr_without_a_terminal_gets_one_line_per_stage(err: Read) -> None:
    with show_stage("fit"):
        with show_stage("planning by auto", limit_s=30):
            tell_progress(lambda: "search, best so far 13.4 s")
            look()
            look()
        with show_stage("writing"):
            look()
        look()
    assert err().splitlines() == [
        "teraio: fit: planning by auto: search, best so far 13.4 s; 0 s of at most 30 s",
        "teraio: fit: writing; 0 s",
    ]


def test_line_on_a_terminal_is_overwritten_and_removed(err: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for name in ("CI", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((40, 9)))
    with show_stage("demo"):
        for step in range(2):
            tell_progress(f"step {step + 1} of 2, and a text that is longer than this terminal is wide")
            look()
    lines = terminal.getvalue().split("\r\033[K")
    assert [line[:27] for line in lines] == [
        "",
        "teraio: demo: step 1 of 2, ",
        "teraio: demo: step 2 of 2, ",
        "",
    ]
    assert all(len(line) < 40 and "\n" not in line for line in lines)


def test_short_or_silenced_stages_print_nothing(err: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 5.0)
    with show_stage("short"):
        look()
    monkeypatch.undo()
    assert progress.is_quiet()  # pytest is running, so progress prints nothing
    with show_stage("silent"):
        assert progress._LINE is None
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for word, silent in {"": False, "info": False, " Warning": True, "error": True, "off": True}.items():
        monkeypatch.setenv("TERAIO_LOG", word)
        assert progress.is_quiet() is silent
    assert err() == ""


def test_progress_thread_prints_and_ends_with_its_block(err: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.001)
    with pytest.raises(ValueError, match="of the block"):
        with show_stage("waiting"):
            ends = time.monotonic() + 10
            while not (shown := err()) and time.monotonic() < ends:
                time.sleep(0.001)
            raise ValueError("of the block")
    assert shown == "teraio: waiting; 0 s\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "teraio-progress"]
    assert progress._LINE is None


def test_stage_with_a_logger_is_logged(err: Read, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("teraio")
    caplog.set_level(logging.INFO, "teraio")
    with show_stage("compiling", say=log.info):
        with show_stage("the forward of 9 operators"):
            look()
        look()
    assert caplog.messages == ["teraio: compiling: the forward of 9 operators; 0 s"]
    assert err() == ""


def test_other_threads_and_forked_children_print_nothing(err: Read) -> None:
    def beside() -> None:
        with show_stage("beside"):
            tell_progress("nothing of this")

    with show_stage("mine"):
        other = threading.Thread(target=beside)
        other.start()
        other.join()
        child = os.fork()
        if child == 0:
            os._exit(0 if progress._LINE is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        look()
    assert err() == "teraio: mine; 0 s\n"


def test_planning_shows_the_planner_and_its_best_step(
    err: Read, tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check which stages are open when the command makes plans with one planner or with all planners.

    The command takes less than the time after which a line is printed, so stderr is empty.
    """
    profile, machine = f"{tmp_path}/p.json", f"{tmp_path}/m.json"
    toys.training_profile().write(profile)
    toys.machine(device=10_000, ssd=10_000, rate=400_000).write(machine)
    shown: set[str] = set()

    def keep_status(text: progress.Status) -> None:
        assert progress._LINE is not None
        progress._LINE.stages[-1].status = text
        shown.add(": ".join(each.text() for each in progress._LINE.stages))

    monkeypatch.setattr(progress_lines, "tell_progress", keep_status)
    known = {name: planners.PLANNERS[name] for name in ("greedy", "auto")}
    monkeypatch.setattr(planners, "PLANNERS", known)
    arguments = [profile, "--machine", machine, "--memory", "1500B", "--plan-time", "2s"]
    for command in (["plan", *arguments, "--planner", "all"], ["fit", *arguments, "--planner", "greedy"]):
        assert main.main(command) == 0
    together = "\n".join(sorted(shown))
    for words in (
        "teraio plan: planner 2 of 2: planning by auto: greedy, best so far ",
        "planning by auto: search, best so far ",
        "planning by auto: ilp, best so far ",
        "% above the bound 7.",
        "lower bound by a relaxation with ",
        "teraio fit: plan 1 of up to 9, within 400 B: planning by greedy: ",
    ):
        assert words in together, together
    assert "teraio" not in capsys.readouterr().err
