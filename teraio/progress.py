"""Progress of what takes long: someone who waits for more than five seconds reads what for.

    with stage("planning by auto", limit_s=30):
        tell("search, best so far 13.4 s")       # of the innermost stage; text, or what makes text

On a terminal it is one line on stderr, written over and at last taken away. Elsewhere it is one line for each
stage that takes so long; with `say` these lines go there, as to a logger. What is short says nothing, nor
does anything under pytest, or where TERAIO_LOG wants only what is wrong.

A thread looks at the clock while there are stages, and ends with the outermost.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

AFTER_S = 5.0
EVERY_S = 0.25  # between two looks
Say = Callable[[str], object]
Told = str | Callable[[], str]


@dataclass(slots=True)
class Stage:
    """Something that may take long. `limit_s` 0: nobody knows how long."""

    what: str
    limit_s: float
    begun_s: float
    told: Told = ""
    announced: bool = False

    def text(self) -> str:
        """Says what it is and how far it is."""
        told = self.told if isinstance(self.told, str) else self.told()
        return f"{self.what}: {told}" if told else self.what


class _Line:
    """The stages of one thread, and the thread that shows them."""

    def __init__(self, say: Say | None) -> None:
        self.say, self.stages = say, list[Stage]()
        self.owner, self.stop = threading.get_ident(), threading.Event()
        self.on_terminal = say is None and sys.stderr.isatty()
        self.shown = False
        self.clock = threading.Thread(target=self._show_until_stopped, name="teraio-progress", daemon=True)

    def _show_until_stopped(self) -> None:
        while not self.stop.wait(EVERY_S):
            self.show_if_due()

    def show_if_due(self) -> None:
        """Shows what is to be shown by now."""
        stages, now_s = list(self.stages), monotonic()
        late = [now_s - stage.begun_s >= AFTER_S and not stage.announced for stage in stages]
        if self.on_terminal and stages and (self.shown or late[0]):
            self.shown = True
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # 0: it does not know
            _write_to_stderr(f"\r\033[K{_describe_stages(stages, now_s)[: width - 1]}")
        elif any(late) and not self.on_terminal:
            for stage in stages:
                stage.announced = True
            (self.say or _write_line_to_stderr)(_describe_stages(stages, now_s))

    def stop_and_clear(self) -> None:
        """Ends the thread and takes the line away."""
        self.stop.set()
        if self.clock.ident is not None and self.clock.is_alive():
            self.clock.join()
        if self.shown:
            _write_to_stderr("\r\033[K")


def _describe_stages(stages: list[Stage], now_s: float) -> str:
    parts = [stage.text() for stage in stages]
    limits = [f" of at most {stage.limit_s:.0f} s" for stage in stages if stage.limit_s]
    begun_s = next((stage.begun_s for stage in reversed(stages) if stage.limit_s), stages[0].begun_s)
    return f"{': '.join(parts)}; {now_s - begun_s:.0f} s{''.join(limits[-1:])}"


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _write_line_to_stderr(text: str) -> None:
    _write_to_stderr(f"{text}\n")


_LINE: _Line | None = None


def _forget_line_after_fork() -> None:
    """In a child that was forked in the middle of a stage: it has no such thread, and nothing to show."""
    global _LINE
    _LINE = None


os.register_at_fork(after_in_child=_forget_line_after_fork)


def is_quiet() -> bool:
    """Whether nothing is to be shown: the output of a test is compared, or only what is wrong is wanted."""
    asked = os.environ.get("TERAIO_LOG", "").strip().lower()
    return "PYTEST_CURRENT_TEST" in os.environ or asked in ("warning", "error", "off")


@contextmanager
def show_stage(what: str, *, limit_s: float = 0.0, say: Say | None = None) -> Iterator[None]:
    """Shows this while the block runs, if that takes long. `say`: where its lines go, instead of stderr, if
    no stage is open around it."""
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


def tell_progress(told: Told) -> None:
    """Says how far the innermost stage is: text, or what makes it when it is to be shown."""
    line = _LINE
    if line is not None and line.stages and line.owner == threading.get_ident():
        line.stages[-1].told = told
