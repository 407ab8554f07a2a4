"""The start of a child process of the GPU run.

A rehearsal is a GPU run without a GPU. In a rehearsal the module installs the stand-in for the GPU's driver.
The module also writes partial results to a file, and computes the time left until the deadline.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

BEGUN_S = time.monotonic()
REHEARSAL = os.environ.get("REHEARSE", "") not in ("", "0")


def stand_in() -> None:
    """Install the stand-in for a GPU in a rehearsal. Call this function before torch looks for a GPU."""
    if REHEARSAL and (name := os.environ.get("STAND_IN", "")):
        importlib.import_module(name)


def write(found: dict[str, Any]) -> None:
    """Write the result file atomically. If the process is killed, the file has the last complete result."""
    path = Path(os.environ.get("RESULT") or os.devnull)
    if path == Path(os.devnull):
        return
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(path)


def left_s() -> float:
    """Return the seconds until this process is killed."""
    return float(os.environ.get("UNTIL_S", "1e9")) - (time.monotonic() - BEGUN_S)
