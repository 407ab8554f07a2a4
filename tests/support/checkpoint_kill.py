"""A process that saves without end, and is killed in the middle of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from store_rig import in_child

import teraio

NUMBERS = 1 << 20


def numbered(number: int) -> dict[str, object]:
    return {"number": number, "bytes": torch.full((NUMBERS,), number)}


def saved_forever(path: Path) -> None:
    torch.set_num_threads(
        1
    )  # OpenMP's threads did not come along with the fork: a parallel loop waits for them
    number = 0
    while True:
        number += 1
        teraio.save(numbered(number), path)


def kill_while_saving(path: Path, seconds: float) -> int:
    """Returns the number in the file that is there afterwards; -1 if it is not whole."""
    pid = in_child(lambda: saved_forever(path))
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        found = torch.load(path)
    except Exception:  # noqa: BLE001 - half a file fails in many ways
        return -1
    whole = len(found["bytes"]) == NUMBERS and bool((found["bytes"] == found["number"]).all())
    return int(found["number"]) if whole else -1
