"""The start of a child process of the GPU run.

In a rehearsal the module installs the stand-in for a GPU's driver. The module writes partial results to a
file, and reports the time left until the deadline.
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
    """Install the stand-in in a rehearsal, where there is no GPU. Call it before torch looks for a GPU."""
    if REHEARSAL and (name := os.environ.get("STAND_IN", "")):
        importlib.import_module(name)


def write(found: dict[str, Any]) -> None:
    """Write the result file atomically. If the process is then killed, the file has the last whole result."""
    path = Path(os.environ.get("RESULT") or os.devnull)
    if path == Path(os.devnull):
        return
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(path)


def left_s() -> float:
    """Return the seconds until this process is killed."""
    return float(os.environ.get("UNTIL_S", "1e9")) - (time.monotonic() - BEGUN_S)
