"""A process that makes a plan while the training goes on. In: a function of the planners with its arguments.
Out: its result.

    running = PlannerProcess(partial(planners.plan, profile, ...), 30)     start, with a time limit
    running.has_ended()                                                    ask, without waiting
    running.result()                                                       wait, then return or raise

The steps of the training do not wait for the planner, and the solvers' memory is not the trainer's: the new
process imports neither torch nor the model. Both processes exchange pickled objects through two unnamed
files, so a write never waits for its reader. The new process ends by itself soon after its parent. A process
that takes many times its limit is killed.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from teraio.errors import PlanError, TeraioError

log = logging.getLogger("teraio")

# The option -I of Python ignores the current folder and Python's variables. So only the given path decides
# which modules are imported.
START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1])\n"
    "from teraio.passes.planner.planner_process import run_in_this_process; run_in_this_process()"
)
# The priority of the process is lower than the trainer's by this number. On two cores, a step of a Llama with
# 32 M parameters took 1.5 to 1.7 times as long beside a planner of equal priority. With this number, the
# factor was 1.2 to 1.4.
NICE = 10
# A process is killed if it takes longer than its limit times the first number, plus the second number of
# seconds.
PATIENCE = (5.0, 60.0)
ORPHAN_CHECK_S = 1.0  # seconds between two checks whether the parent still runs

LogLine = tuple[int, str]  # level, message


class PlannerProcess:
    """A running planner in a process of its own. Only the process that made this object may wait for it."""

    def __init__(self, work: Callable[[], Any], limit_s: float) -> None:
        """Start the process. Raise OSError if the system refuses a file or a process."""
        executable = multiprocessing.spawn.get_executable()
        if getattr(sys, "frozen", False) or not executable:
            raise OSError("this program contains its own Python, so it cannot start another one")
        self._owner = os.getpid()
        times, more_s = PATIENCE
        self._most_s = times * limit_s + more_s
        self._until_s = time.monotonic() + self._most_s
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        # The process belongs to the session of the trainer. Linux gives each session the same share of the
        # cores, so in a session of its own the process would take half of them despite its priority.
        with tempfile.TemporaryFile() as request:
            pickle.dump(work, request)
            request.flush()
            request.seek(0)
            self._answer: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
            self._errors: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
            answer = self._answer.fileno()
            try:
                self._process = subprocess.Popen(
                    [
                        *(os.fsdecode(executable), "-I", "-c", START, paths),
                        *(str(self._owner), str(answer), str(NICE)),
                    ],
                    stdin=request,
                    stdout=self._errors,
                    stderr=self._errors,
                    pass_fds=[answer],
                    process_group=0,  # Ctrl-C in the terminal is for the trainer only
                )
            except BaseException:
                self._close_files()
                raise

    def has_ended(self) -> bool:
        """Return True if `result` does not have to wait. In a forked child of the trainer, return False."""
        if os.getpid() != self._owner:
            return False
        return self._process.poll() is not None or time.monotonic() >= self._until_s

    def result(self) -> Any:
        """Wait for the end of the process. Log its log lines, and return the result of the work.

        If the work raised a TeraioError, or the process died, raise a PlanError. Call this once.
        """
        try:
            code = self._process.wait(max(0.0, self._until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.cancel()
            raise PlanError(f"the planner's process was killed after {self._most_s:.0f} s") from None
        except BaseException:  # Ctrl-C, for example
            self.cancel()
            raise
        try:
            self._answer.seek(0)
            lines, outcome, value = pickle.load(self._answer)
        except Exception:  # noqa: BLE001  a process that dies may have written a part of its answer
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            raise PlanError(
                f"the planner's process {_describe_end(code)}{': ' + said[-1] if said else ''}; "
                "with the option planning='inline' the planner runs in the training process"
            ) from None
        finally:
            self._close_files()
        for level, message in lines:
            log.log(level, "%s", message)
        if outcome == "error":
            raise PlanError(value)
        return value

    def cancel(self) -> None:
        """End the process, without a result. In a forked child of the trainer, do nothing."""
        if os.getpid() != self._owner:
            return
        log.info("teraio: the planner's process is stopped before it has made a plan")
        self._process.kill()
        self._process.wait()
        self._close_files()

    def _close_files(self) -> None:
        self._answer.close()
        self._errors.close()


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and without a plan"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class _Lines(logging.Handler):
    """A log handler that keeps all lines, so that the parent can log them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[LogLine] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.levelno, record.getMessage()))


def run_in_this_process() -> None:
    """Read the work from stdin, run it, and write log lines and its result to a file. The new process runs
    this.
    """
    os.nice(int(sys.argv[4]))
    threading.Thread(target=_exit_after_parent, args=(int(sys.argv[2]),), daemon=True).start()
    lines = _Lines()
    logging.basicConfig(handlers=[lines], level=logging.INFO)
    work = pickle.load(sys.stdin.buffer)
    try:
        outcome, value = "result", work()
    except TeraioError as error:
        outcome, value = "error", str(error)
    with os.fdopen(int(sys.argv[3]), "wb") as answer:
        pickle.dump((lines.kept, outcome, value), answer)


def _exit_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)
