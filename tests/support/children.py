"""Processes that tests start. A time limit ends a hanging process, so that only the test that started it
fails. pytest's own timeout would end all tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import ledger

LIMIT_S = 840  # below the faulthandler_timeout of 900 in pyproject.toml


def ended(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    given: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a process to its end and return its result."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=cwd,
        input=given,
        timeout=LIMIT_S,
    )


def forked(
    script: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end in a fork of a process that has already imported torch. Use this function for
    trainings that need no fresh process.
    """
    argv = [str(script.resolve()), *arguments]
    with tempfile.TemporaryDirectory(prefix="teraio-child-") as name:
        out, err = Path(name, "out"), Path(name, "err")
        request = {"argv": argv, "env": dict(os.environ if env is None else env), "cwd": os.getcwd()}
        code, cpu_s = _nursery().run({**request, "out": str(out), "err": str(err), "limit_s": LIMIT_S})
        ledger.elsewhere(cpu_s)
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


def forked_rows(script: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a script as `forked` does. Return the JSON objects that it prints, one per line. The script must
    succeed."""
    done = forked(script, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def _nursery() -> Nursery:
    return Nursery()


class Nursery:
    """A process that runs nursery.py, and the requests that were sent to this process. Any thread may send a
    request.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lock = threading.Lock()
        self.requests: list[Future[tuple[int, float]]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self, request: dict[str, Any]) -> tuple[int, float]:
        """Send a request to the process, and wait until the requested script ends. Return the script's exit
        code and its CPU time in seconds.
        """
        assert self.process.stdin is not None
        with self.lock:
            number = len(self.requests)
            self.requests.append(Future())
            self.process.stdin.write(json.dumps({**request, "number": number}) + "\n")
            self.process.stdin.flush()
        return self.requests[number].result(LIMIT_S + 10)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            number, code, cpu_s = json.loads(line)
            self.requests[number].set_result((code, cpu_s))
        with self.lock:
            for each in self.requests:
                if not each.done():
                    each.set_exception(RuntimeError(f"the nursery has ended: {self.process.wait()}"))


def one_by_one(items: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """Run items in a child process that they share, and collect a result for each item.

    If an item ends its process, the item's result is None. Another process then continues with the next item.
    """
    found: list[Any] = []
    while len(found) < len(items):
        found += run(items[len(found) :])
        if len(found) < len(items):
            found.append(None)
    return found
