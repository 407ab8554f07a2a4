"""Functions that a planner process runs in tests. They are in a module of their own, because the process
imports the module of its function, and test modules import torch."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from teraio.errors import PlanError


def doubled(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


def imported_after_planners(names: Sequence[str]) -> list[str]:
    """Import the planners. Return which of the named modules are then imported."""
    importlib.import_module("teraio.passes.planner.planners")
    return [name for name in names if name in sys.modules]


def noisy(line: str) -> str:
    """Print to stdout, as Python and as a library of C do, and log `line`."""
    print("printed")
    os.write(1, b"written\n")
    logging.getLogger("teraio").warning("%s", line)
    return "done"


def refuse(message: str) -> None:
    raise PlanError(message)


def fail(message: str) -> None:
    raise AssertionError(message)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def kill_parent_then_sleep(number: int) -> None:
    os.kill(os.getppid(), number)
    time.sleep(60)


def slept(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def after_sleep(seconds: float, call: Callable[[], Any]) -> Any:
    time.sleep(seconds)
    return call()


def after_file(path: Path, most_s: float, call: Callable[[], Any]) -> Any:
    """Return what `call` returns, once the file exists, or after `most_s`."""
    until_s = time.monotonic() + most_s
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    return call()
