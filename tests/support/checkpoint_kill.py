"""A process that saves a checkpoint in an endless loop, and is killed during a save."""

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
    # One thread, because a parallel loop would wait for OpenMP's threads, which a fork does not copy.
    torch.set_num_threads(1)
    number = 0
    while True:
        number += 1
        teraio.save(numbered(number), path)


def kill_while_saving(path: Path, seconds: float) -> int:
    """Start a process that saves numbered checkpoints, and kill it after `seconds`. Return the number in the
    checkpoint file, or -1 if the file is not whole.
    """
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
