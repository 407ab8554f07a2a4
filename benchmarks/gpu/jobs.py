"""Children with deadlines, several at a time: what one of them does costs no other anything.

    Job      a command, what it needs of the card, and how long it may take
    Crew     starts jobs in their order as far as the card's memory reaches, and ends each at its deadline
    Ended    what became of one: its exit code, the result file that it wrote, the end of its log

A child is the first of a process group, and all of the group ends with it. Nothing here waits without a
limit: a process that does not even end when it is killed is given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, Any]

LOOK_S = 0.05
STACK_S = 1.5  # from the signal that makes Python say where it is to the one that ends it
GIVEN_UP_S = 5.0  # a process in the driver's hands may not end at all
TAIL_BYTES = 16_000


@dataclass(frozen=True, slots=True)
class Job:
    """Something to run. `gib`: of the card's memory; `after`: jobs that must have ended before."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    gib: float = 0.0
    least_s: float = 10.0  # with less time than this there is no use in starting
    after: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    asked: Figures = field(default_factory=dict)  # what its row says of it


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job. `code` is None if it never ran, or did not end when it was killed."""

    job: Job
    code: int | None
    seconds: float
    why: str  # "ended", "past its limit", "no time left"
    result: Figures
    log: Path | None = None

    @property
    def tail(self) -> str:
        return tail(self.log) if self.log else ""

    @property
    def in_order(self) -> bool:
        """It ended by itself, without an error, and says so in its result."""
        return self.code == 0 and bool(self.result.get("ended"))


def tail(path: Path, size_bytes: int = TAIL_BYTES) -> str:
    """The end of a log, which may have anything in it."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - size_bytes))
            return log.read(size_bytes).decode(errors="replace")
    except OSError:
        return ""


def read(path: Path) -> Figures:
    """A result file; empty if there is none, or if it is not whole."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Child:
    """A job that runs."""

    def __init__(self, job: Job, folder: Path, ends_s: float) -> None:
        name = "".join(c if c.isalnum() else "-" for c in job.name)
        self.job, self.begun_s, self.why = job, time.monotonic(), "ended"
        self.ends_s = min(self.begun_s + job.limit_s, ends_s)
        self.log, self.result = folder / f"{name}.log", folder / f"{name}.json"
        self.result.unlink(missing_ok=True)
        environment = {
            **os.environ,
            **dict(job.environment),
            "RESULT": str(self.result),
            "UNTIL_S": str(self.ends_s - self.begun_s),
        }
        with self.log.open("wb") as log:
            # A group and not a session: whoever ends our session ends the children with it.
            self.process = subprocess.Popen(
                job.command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )

    def signal(self, number: signal.Signals, group: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)

    def ended(self) -> Ended:
        """Called when it has ended, or was given up: what it left in its group ends, too."""
        self.signal(signal.SIGKILL, group=True)
        seconds = round(time.monotonic() - self.begun_s, 1)
        return Ended(self.job, self.process.poll(), seconds, self.why, read(self.result), self.log)


OnEnd = Callable[[Ended], Iterable[Job]]


class Crew:
    """Runs jobs side by side. `on_end` gets each that has ended, at once, and may return more jobs."""

    def __init__(self, folder: Path, on_end: OnEnd) -> None:
        self.folder, self.on_end = folder, on_end
        self.running: list[Child] = []

    def run(self, jobs: Sequence[Job], ends_s: float, most: int = 1, gib: float = float("inf")) -> None:
        """All jobs, at most so many at a time and as the card's memory reaches; at `ends_s`, by the monotonic
        clock, whatever still runs is killed."""
        waiting = list(jobs)
        while waiting or self.running:
            for job in self._startable(waiting, most, gib, ends_s):
                waiting.remove(job)
                waiting[:0] = self._start(job, ends_s)
            if not self.running and not self._startable(waiting, most, gib, ends_s):
                # For something that does not come, or there is no time left.
                for job in waiting:
                    self._tell(Ended(job, None, 0.0, "no time left", {}))
                return
            time.sleep(LOOK_S)
            waiting[:0] = self._collect()

    def _startable(self, waiting: list[Job], most: int, gib: float, ends_s: float) -> list[Job]:
        """In their order. A job that is larger than the card is tried alone: it says what is missing."""
        found: list[Job] = []
        taken = sum(child.job.gib for child in self.running)
        names = {job.name for job in waiting} | {child.job.name for child in self.running}
        for job in waiting:
            busy = bool(self.running or found)
            if names & set(job.after) or time.monotonic() + job.least_s > ends_s:
                continue
            if len(self.running) + len(found) >= most or (busy and taken + job.gib > gib):
                break  # none overtakes it: a large one would wait for ever
            found.append(job)
            taken += job.gib
        return found

    def _start(self, job: Job, ends_s: float) -> list[Job]:
        try:
            self.running.append(Child(job, self.folder, ends_s))
        except OSError as error:  # there is no such command
            return self._tell(Ended(job, 127, 0.0, f"not started: {error}", {}))
        return []

    def _collect(self) -> list[Job]:
        now = time.monotonic()
        self._stop([child for child in self.running if now > child.ends_s and child.process.poll() is None])
        more: list[Job] = []
        for child in [
            child for child in self.running if child.process.poll() is not None or child.why != "ended"
        ]:
            self.running.remove(child)
            more += self._tell(child.ended())
        return more

    def _tell(self, ended: Ended) -> list[Job]:
        return list(self.on_end(ended))

    def _stop(self, children: Sequence[Child], why: str = "past its limit") -> None:
        """First the signal on which Python prints where it is, then the one that cannot be refused."""
        if not children:
            return
        for child in children:
            child.why = why
            child.signal(signal.SIGABRT, group=False)
        _wait(children, STACK_S)
        for child in children:
            child.signal(signal.SIGKILL, group=True)
        _wait(children, GIVEN_UP_S)

    def stop_all(self) -> None:
        """For a signal from outside: no child outlives us."""
        for child in self.running:
            child.signal(signal.SIGKILL, group=True)


def _wait(children: Sequence[Child], seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s and any(child.process.poll() is None for child in children):
        time.sleep(LOOK_S)
