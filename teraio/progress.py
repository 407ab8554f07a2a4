"""Progress of work that takes longer than five seconds, as lines on stderr.

    with show_stage("planning by auto", limit_s=30):
        tell_progress("search, best so far 13.4 s")       # status of the innermost stage

On a terminal, progress is one line, which is overwritten while the work runs and erased at its end. In two
cases, each stage that takes longer than five seconds prints one whole line instead: (1) if stderr is no
terminal, (2) while tqdm shows a bar. Such lines are above the bar. If the caller gives the function `say`, it
receives these lines, for example to log them. Shorter work prints nothing. Under pytest, and if TERAIO_LOG
allows only warnings or errors, nothing is printed.

A thread checks the clock while any stage is open. It ends with the outermost stage.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic

from teraio.terminal import bars_cleared, can_overwrite_line, has_bars, terminal_of

AFTER_S = 5.0
EVERY_S = 0.25  # seconds between two checks of the clock
ERASE = "\r\033[K"  # erases the line of the cursor
Say = Callable[[str], object]
Status = str | Callable[[], str]


@dataclass(slots=True)
class Stage:
    """A piece of work that may take long. `limit_s` is its time limit in seconds, or 0 if it has none."""

    what: str
    limit_s: float
    begun_s: float
    status: Status = ""
    announced: bool = False

    def text(self) -> str:
        """Return the stage's name and its status, if it has one."""
        status = self.status if isinstance(self.status, str) else self.status()
        return f"{self.what}: {status}" if status else self.what


class _Line:
    """The open stages of one thread, and the clock thread that prints them."""

    def __init__(self, say: Say | None) -> None:
        self.say, self.stages = say, list[Stage]()
        self.owner, self.stop = threading.get_ident(), threading.Event()
        self.on_terminal = say is None and can_overwrite_line(sys.stderr)
        self.shown = False
        self.writing = threading.RLock()  # held by the thread that writes to the terminal
        self.clock = threading.Thread(target=self._show_until_stopped, name="teraio-progress", daemon=True)

    def _show_until_stopped(self) -> None:
        while not self.stop.wait(EVERY_S):
            self.show_if_due()

    def show_if_due(self) -> None:
        """Print the stages if one of them has been open for `AFTER_S` seconds."""
        stages, now_s = list(self.stages), monotonic()
        late = [now_s - stage.begun_s >= AFTER_S and not stage.announced for stage in stages]
        in_place = self.on_terminal and not has_bars(sys.stderr)
        if in_place and stages and (self.shown or late[0]):
            with self.writing:
                self.shown = True
                text = _describe_stages(stages, now_s)[: terminal_of(sys.stderr).width - 1]
                _write_to_stderr(f"{ERASE}{text}")
        elif any(late) and not in_place:
            for stage in stages:
                stage.announced = True
            (self.say or self.write_line)(_describe_stages(stages, now_s))

    def write_line(self, text: str) -> None:
        """Write a line to stderr, above the bars of other libraries."""
        with self.writing, bars_cleared(sys.stderr):
            self.erase()
            _write_to_stderr(f"{text}\n")

    def erase(self) -> None:
        """Remove the line from the terminal, if it is there."""
        if self.shown:
            self.shown = False
            _write_to_stderr(ERASE)

    def stop_and_clear(self) -> None:
        """End the clock thread, and erase the line on the terminal."""
        self.stop.set()
        if self.clock.ident is not None and self.clock.is_alive():
            self.clock.join()
        with self.writing:
            self.erase()


def _describe_stages(stages: list[Stage], now_s: float) -> str:
    parts = [stage.text() for stage in stages]
    limits = [f" of at most {stage.limit_s:.0f} s" for stage in stages if stage.limit_s]
    begun_s = next((stage.begun_s for stage in reversed(stages) if stage.limit_s), stages[0].begun_s)
    return f"{': '.join(parts)}; {now_s - begun_s:.0f} s{''.join(limits[-1:])}"


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


_LINE: _Line | None = None


def _forget_line_after_fork() -> None:
    """Close all stages in a forked child, because the clock thread exists only in the parent."""
    global _LINE
    _LINE = None


os.register_at_fork(after_in_child=_forget_line_after_fork)


def is_quiet() -> bool:
    """Return True under pytest, because tests compare output. Also return True if TERAIO_LOG hides
    progress.
    """
    level = os.environ.get("TERAIO_LOG", "").strip().lower()
    return "PYTEST_CURRENT_TEST" in os.environ or level in ("warning", "error", "off")


@contextmanager
def show_stage(what: str, *, limit_s: float = 0.0, say: Say | None = None) -> Iterator[None]:
    """Show the stage `what` while the block runs, if the block takes longer than `AFTER_S` seconds.

    A stage may be inside another stage. If the outermost stage has a `say`, all lines go to `say` instead of
    stderr.
    """
    global _LINE
    line, first = _LINE, False
    if line is None and not is_quiet():
        line, first = _Line(say), True
        _LINE = line
    if line is None or line.owner != threading.get_ident():
        yield
        return
    named = what if not first or what.startswith("teraio") else f"teraio: {what}"
    line.stages.append(Stage(named, limit_s, monotonic()))
    try:
        if first:
            line.clock.start()
        yield
    finally:
        line.stages.pop()
        if first:
            _LINE = None
            line.stop_and_clear()


@contextmanager
def line_erased() -> Iterator[None]:
    """Remove the progress line, if any, while the block writes other lines. The clock thread then writes it
    again.
    """
    line = _LINE
    with line.writing if line is not None else nullcontext():
        if line is not None:
            line.erase()
        yield


def tell_progress(status: Status) -> None:
    """Set the status text of the innermost stage. `status` may also be a function that returns the text."""
    line = _LINE
    if line is not None and line.stages and line.owner == threading.get_ident():
        line.stages[-1].status = status
