"""Tests of output on terminals: colours, widths, and lines beside the bars of tqdm.

Output in a pipe is plain. The progress and log lines of teraio never share a line with a bar.
"""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import toys

from teraio import progress
from teraio.cli import demo
from teraio.formats.plan import Evict, Fetch, Plan
from teraio.formats.timeline import Counter, Stall
from teraio.passes.planner.simulate.simulate import simulate
from teraio.report import content, terminal_text
from teraio.session import log_lines
from teraio.terminal import PLAIN, Terminal, has_bars, terminal_of
from teraio.text_table import aligned_text_table

tqdm = pytest.importorskip("tqdm").tqdm
STYLE = re.compile(r"\033\[[0-9;]*m")
VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CI", "TERM", "COLUMNS")
PLAN = Plan("", "hand", 8, (), (Evict("a", "ssd", 4, 1), Fetch("a", "ssd", 6, 9)))
ROWS = (
    ("lane", "name", "transfers", "carries", "busy", "of the step", "while busy", "the link can"),
    ("device to host", "evict:host", "543", "80.6 GiB", "2.46 s", "57.6%", "35.2 GB/s", "40 GB/s"),
)


class Stream(io.StringIO):
    """A stream that claims to be a terminal of 60 columns."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    yield
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows after this text, without styles and spaces at the end."""
    rows, row, column = [""], 0, 0
    for piece in re.findall(r"\033\[[0-9;]*[A-Za-z]|.|\n", STYLE.sub("", text)):
        if piece == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif piece == "\r":
            column = 0
        elif piece == "\033[K":
            rows[row] = rows[row][:column]
        elif piece == "\033[A":
            row -= 1
        else:
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in rows]


@pytest.mark.parametrize(
    ("environment", "terminal", "pipe"),
    [
        ({}, Terminal(60, True), PLAIN),
        ({"NO_COLOR": "1"}, Terminal(60, False), PLAIN),
        ({"NO_COLOR": "", "COLUMNS": "9"}, Terminal(40, True), PLAIN),
        ({"FORCE_COLOR": "1"}, Terminal(60, True), Terminal(0, True)),
        ({"FORCE_COLOR": "0"}, Terminal(60, True), PLAIN),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, Terminal(60, False), PLAIN),
        ({"TERM": "dumb"}, PLAIN, PLAIN),
        ({"CI": "true"}, PLAIN, PLAIN),
        ({"CI": "true", "FORCE_COLOR": "1"}, Terminal(0, True), Terminal(0, True)),
    ],
)
def test_colours_and_width_follow_the_stream_and_the_variables(
    environment: dict[str, str], terminal: Terminal, pipe: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert terminal_of(Stream()) == terminal
    assert terminal_of(io.StringIO()) == pipe
    assert terminal_of(None) == pipe


def test_table_fits_each_width_and_keeps_every_column() -> None:
    plain = aligned_text_table(ROWS)
    assert len(plain.splitlines()) == 2 and aligned_text_table(ROWS, terminal=Terminal(200)) == plain
    for width in range(40, 120):
        table = aligned_text_table(ROWS, terminal=Terminal(width))
        assert max(map(len, table.splitlines())) < width
        assert all(word in table for row in ROWS for word in row)
    long = (("tensor", "time"), ("x" * 90, "1 ms"))
    assert aligned_text_table(long, terminal=Terminal(50)).splitlines()[1] == f"  {'x' * 40}…  1 ms"


def report() -> content.Content:
    line = simulate(PLAN, toys.diamond(), toys.machine())
    counters = (*line.counters, Counter("device", "weight", 0, 1), Counter("device", "unknown", 0, 1))
    line = replace(line, kind="measured", counters=counters, stalls=(Stall(9, "a", 2_000, "late read"),))
    return content.assemble_content(content.Sources(line, "run"))


def test_report_fits_the_terminal_and_has_the_same_text_in_colour() -> None:
    plain = terminal_text.report_as_text(report())
    assert "\033" not in plain
    assert STYLE.sub("", terminal_text.report_as_text(report(), terminal=Terminal(0, True))) == plain
    for width in (60, 100, 160):
        coloured = terminal_text.report_as_text(report(), terminal=Terminal(width, True))
        text = STYLE.sub("", coloured)
        assert text == terminal_text.report_as_text(report(), terminal=Terminal(width))
        assert max(map(len, text.splitlines())) < width
    # The picture fills the terminal, up to 132 columns. The weights are blue blocks.
    assert f"+{'-' * 132}\n" in text
    assert "\033[34;7mwww" in coloured and "\033[32;7ma" in coloured


def test_demo_fits_a_narrow_terminal() -> None:
    picture = demo._memory_picture([9] * 4, [5] * 4, 6, terminal=Terminal(60, True))
    assert max(map(len, STYLE.sub("", picture).splitlines())) < 60
    assert "\033[34;7m#" in picture and "\033[90;7m:" in picture


PTY_CHILD = """
import sys, threading
from teraio import progress
from tqdm import tqdm
progress.AFTER_S, progress.EVERY_S = 0.0, 60.0
def look(): progress._LINE.show_if_due()
with progress.show_stage("first"):
    look()
    progress.tell_progress("in place")
    look()
bar = tqdm(total=3, ncols=40, mininterval=0, file=sys.stderr, bar_format="bar {n_fmt}/{total_fmt}")
for step in range(3):
    with progress.show_stage(f"step {step}"):
        look()
        bar.update(1)
        look()
bar.close()
with progress.show_stage("last"):
    look()
print("end", file=sys.stderr)
"""


def test_progress_lines_and_a_bar_share_a_real_terminal() -> None:
    """Run a child on a pseudo-terminal.

    Without a bar, progress is one line, which is erased. With a bar, each stage prints a line above the bar.
    """
    child, terminal = pty.fork()
    if child == 0:
        environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        environment["TERM"] = "xterm"
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        os.execve(sys.executable, [sys.executable, "-c", PTY_CHILD], environment)
    text = b""
    while True:
        try:
            text += os.read(terminal, 65536)
        except OSError:  # the child has ended
            break
    assert os.waitpid(child, 0)[1] == 0, text.decode()
    os.close(terminal)
    shown = text.decode().replace("\r\n", "\n")
    assert f"{progress.ERASE}teraio: first: in place; 0 s{progress.ERASE}" in shown
    assert screen(shown) == [
        "teraio: step 0; 0 s",
        "teraio: step 1; 0 s",
        "teraio: step 2; 0 s",
        "bar 3/3",
        "end",
        "",
    ]


def test_log_lines_are_above_a_bar_and_a_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "is_quiet", lambda: False)
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    writer = log_lines._LinesOnStderr()
    writer.setFormatter(log_lines._PaintedWarnings("%(message)s"))
    log = logging.Logger("beside")
    log.addHandler(writer)
    with progress.show_stage("planning"):
        assert progress._LINE is not None
        progress._LINE.show_if_due()
        log.info("one")
        progress._LINE.show_if_due()
        assert screen(stream.getvalue()) == ["one", "teraio: planning; 0 s"]
    bar = tqdm(total=3, mininterval=0, file=stream, bar_format="bar {n_fmt}/{total_fmt}")
    assert has_bars(stream)
    log.info("two")
    log.warning("three")
    bar.update(1)
    assert screen(stream.getvalue()) == ["one", "two", "three", "bar 1/3"]
    bar.close()
    assert "\033[33mthree\033[0m" in stream.getvalue() and "\033[33mtwo" not in stream.getvalue()


def test_log_line_beside_a_locked_bar_waits_for_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a log line is written while another thread holds the lock of all bars."""
    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    bar = tqdm(total=3, mininterval=0, file=stream)
    log = logging.Logger("beside")
    log.addHandler(log_lines._LinesOnStderr())
    with tqdm.get_lock():
        writer = threading.Thread(target=log.warning, args=("written",), daemon=True)
        writer.start()
        writer.join(10)
        assert not writer.is_alive()
    bar.close()
    assert "written" in stream.getvalue()


def test_terminal_of_rich_gets_whole_lines() -> None:
    """Check that no line is overwritten while rich shows a bar, because rich replaces the stream."""

    class Proxy(Stream):
        rich_proxied_file = sys.stderr

    assert terminal_of(Proxy()) == PLAIN
