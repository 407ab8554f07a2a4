"""Child processes with deadlines. Several children run at the same time, isolated from each other.

    Job      a command, its share of the card's memory, and its time limit
    Crew     starts jobs in order as the card's memory allows, and ends each at its deadline
    Ended    the end of a job: exit code, result file and the end of its log

Each child leads its own process group, and the whole group ends with it. Every wait in this module has a
limit. This module stops waiting for a process that survives SIGKILL.
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
STACK_S = 1.5  # seconds between the signal that makes Python print its stack and SIGKILL
GIVEN_UP_S = 5.0  # seconds to wait for a killed process; a process inside the driver may never end
TAIL_BYTES = 16_000


@dataclass(frozen=True, slots=True)
class Job:
    """A command to run. `gib` is the GPU memory that the command needs, in GiB. `after` names jobs that must
    end before this job starts.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    gib: float = 0.0
    least_s: float = 10.0  # the crew starts the job only if at least this time is left
    after: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    asked: Figures = field(default_factory=dict)  # the job's settings, as its row reports them


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a job. `code` is None if the job never ran, or survived SIGKILL."""

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
        """Return True if the job's exit code is 0 and its result file says that the work ended."""
        return self.code == 0 and bool(self.result.get("ended"))


def tail(path: Path, size_bytes: int = TAIL_BYTES) -> str:
    """Return the end of a log, which may contain any bytes."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - size_bytes))
            return log.read(size_bytes).decode(errors="replace")
    except OSError:
        return ""


def read(path: Path) -> Figures:
    """Return a result file's content, or an empty dict if the file is missing or truncated."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Child:
    """A running job."""

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
            # The child gets its own process group, but remains in our session. So the end of our session also
            # ends the child.
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
        """Return the end of the job: its exit code, duration, result and log.

        Kill the rest of the job's process group. Call this method after the job has ended,
        or after the crew has stopped waiting for the job.
        """
        self.signal(signal.SIGKILL, group=True)
        seconds = round(time.monotonic() - self.begun_s, 1)
        return Ended(self.job, self.process.poll(), seconds, self.why, read(self.result), self.log)


OnEnd = Callable[[Ended], Iterable[Job]]


class Crew:
    """A crew that runs jobs side by side. When a job ends, the crew calls `on_end`, which may return more
    jobs.
    """

    def __init__(self, folder: Path, on_end: OnEnd) -> None:
        self.folder, self.on_end = folder, on_end
        self.running: list[Child] = []

    def run(self, jobs: Sequence[Job], ends_s: float, most: int = 1, gib: float = float("inf")) -> None:
        """Run all jobs. At the same time, run at most `most` jobs, which use at most `gib` of the card's
        memory.

        At `ends_s`, by the monotonic clock, kill all jobs that still run.
        """
        waiting = list(jobs)
        while waiting or self.running:
            for job in self._startable(waiting, most, gib, ends_s):
                waiting.remove(job)
                waiting[:0] = self._start(job, ends_s)
            if not self.running and not self._startable(waiting, most, gib, ends_s):
                # No time is left, or each remaining job waits for a job that cannot end.
                for job in waiting:
                    self._tell(Ended(job, None, 0.0, "no time left", {}))
                return
            time.sleep(LOOK_S)
            waiting[:0] = self._collect()

    def _startable(self, waiting: list[Job], most: int, gib: float, ends_s: float) -> list[Job]:
        """Return the jobs that can start now, in the order of `waiting`.

        Run a job that is larger than the card alone, because its error states how much memory is missing.
        """
        found: list[Job] = []
        taken = sum(child.job.gib for child in self.running)
        names = {job.name for job in waiting} | {child.job.name for child in self.running}
        for job in waiting:
            busy = bool(self.running or found)
            if names & set(job.after) or time.monotonic() + job.least_s > ends_s:
                continue
            if len(self.running) + len(found) >= most or (busy and taken + job.gib > gib):
                break  # smaller jobs do not overtake a large job, so it does not wait forever
            found.append(job)
            taken += job.gib
        return found

    def _start(self, job: Job, ends_s: float) -> list[Job]:
        try:
            self.running.append(Child(job, self.folder, ends_s))
        except OSError as error:  # no such command
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
        """Send SIGABRT, so that Python prints its stack. Then send SIGKILL."""
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
        """Kill all children when a signal ends this process."""
        for child in self.running:
            child.signal(signal.SIGKILL, group=True)


def _wait(children: Sequence[Child], seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s and any(child.process.poll() is None for child in children):
        time.sleep(LOOK_S)
