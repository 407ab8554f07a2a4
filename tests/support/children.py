"""Processes that tests start. One that hangs fails its test, before pytest would end all of them for it."""

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

LIMIT_S = 840  # pyproject.toml has faulthandler_timeout: 900


def ended(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    given: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Of a process that ran to its end."""
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
    """Run a script to its end in a process that has torch imported: for trainings that need no fresh one."""
    argv = [str(script.resolve()), *arguments]
    with tempfile.TemporaryDirectory(prefix="teraio-child-") as name:
        out, err = Path(name, "out"), Path(name, "err")
        asked = {"argv": argv, "env": dict(os.environ if env is None else env), "cwd": os.getcwd()}
        code, cpu_s = _nursery().run({**asked, "out": str(out), "err": str(err), "limit_s": LIMIT_S})
        ledger.elsewhere(cpu_s)
        return subprocess.CompletedProcess(argv, code, out.read_text(), err.read_text())


@cache
def _nursery() -> Nursery:
    return Nursery()


class Nursery:
    """A process of nursery.py and the requests that it works on; any thread may make one."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nursery.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lock = threading.Lock()
        self.asked: list[Future[tuple[int, float]]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self, request: dict[str, Any]) -> tuple[int, float]:
        """Return the exit code and the seconds of CPU time."""
        assert self.process.stdin is not None
        with self.lock:
            number = len(self.asked)
            self.asked.append(Future())
            self.process.stdin.write(json.dumps({**request, "number": number}) + "\n")
            self.process.stdin.flush()
        return self.asked[number].result(LIMIT_S + 10)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            number, code, cpu_s = json.loads(line)
            self.asked[number].set_result((code, cpu_s))
        with self.lock:
            for each in self.asked:
                if not each.done():
                    each.set_exception(RuntimeError(f"the nursery has ended: {self.process.wait()}"))


def one_by_one(items: Sequence[Any], run: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """Collects a result for each item, from items that share a process. None stands for an item that ended
    its process; the items after it go on in another one."""
    found: list[Any] = []
    while len(found) < len(items):
        found += run(items[len(found) :])
        if len(found) < len(items):
            found.append(None)
    return found
