"""Trainings in processes of their own, for parts 2 to 5, and how one is laid beside another.

With REHEARSE=1 in the environment all of it runs on the CPU, where host memory and the GPU's own figures are
left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from part1 import REHEARSAL, ran, torch_on_gpu
from sections import Figures, Room, write

DEVICE = "cpu" if REHEARSAL else "cuda"
TRAINEE = Path(__file__).with_name("trainee.py")
SMALL: Figures = {
    "shape": {"vocabulary": 2048, "hidden": 256, "intermediate": 704, "layers": 4, "heads": 4, "key_heads": 2}
    if REHEARSAL
    else {"vocabulary": 8192, "hidden": 1024, "intermediate": 2816, "layers": 8, "heads": 8, "key_heads": 4},
    "batch": 4,
    "length": 128 if REHEARSAL else 512,
    "warmup": 8,
    "steps": 4,
    "clip": 1.0,
}
LIMIT = 300.0 if REHEARSAL else 150.0  # seconds; `limit` in what is asked is another
FRESH_SECONDS = 3600  # a plain run before that was of another occasion
ENVIRONMENT = {
    "TERAIO_CACHE_DIR": "off",
    "TERAIO_PLAN_TIME": "3s",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
IN_ORDER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it cuBLAS may add in another order
SAID_MOST = 20  # lines


def train(
    room: Room, asked: Figures, environment: dict[str, str] | None = None, script: Path = TRAINEE
) -> Figures:
    """What a trainee prints; an error is the end of the case."""
    ordered = IN_ORDER if asked.get("deterministic", True) else {}
    settings = {**os.environ, **ENVIRONMENT, **ordered, **(environment or {})}
    if asked["way"] != "teraio":
        settings["TERAIO_DISABLE"] = "1"
    command = [sys.executable, str(script), json.dumps({"device": DEVICE, **asked})]
    done = ran(command, room, asked.get("limit", LIMIT), env=settings)
    if done.returncode:
        raise RuntimeError(f"its process ended with {done.returncode}: {done.stderr[-3000:]}")
    run: Figures = {**json.loads(done.stdout.strip().splitlines()[-1]), "stderr": done.stderr}
    if asked["way"] == "teraio" and not run["stats"]:
        raise RuntimeError(f"teraio has compiled nothing: {done.stderr[-3000:]}")
    return run


def plain(room: Room, asked: Figures, environment: dict[str, str] | None = None) -> Figures:
    """The same training without teraio: once on this machine, however many sections and parts ask for it."""
    asked = {"way": "plain", **asked}
    text = json.dumps([DEVICE, asked, environment, TRAINEE.read_text()], sort_keys=True)
    path = room.kept / f"plain-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    if path.exists() and time.time() - path.stat().st_mtime < FRESH_SECONDS:
        return {**json.loads(path.read_text()), "reused": True}
    run = train(room, asked, environment)
    write(path, run)
    return run


def on_gpu() -> None:
    if not REHEARSAL:
        torch_on_gpu()


def plain_peak(plain: Figures) -> int:
    """On a CPU a guess is enough: what is rehearsed is the script."""
    return int(plain["allocated_bytes"]) or 200 * 2**20


def memory(run: Figures) -> Figures:
    return {
        **{name: run[name] for name in ("allocated_bytes", "reserved_bytes", "budget_bytes")},
        "excess_bytes": max(0, run["allocated_bytes"] - run["budget_bytes"]) if run["budget_bytes"] else None,
    }


def said(run: Figures) -> list[str]:
    """Teraio's own lines: which plan, and what it had to do without."""
    lines = [line[:300] for line in run["stderr"].splitlines() if line.startswith("teraio")]
    return [line for line in lines if not line.startswith("teraio: measured step")][:SAID_MOST]


def row(plain: Figures, ours: Figures) -> Figures:
    common = min(len(plain["losses"]), len(ours["losses"]))
    stats = ours["stats"]
    return {
        "equal": plain["losses"][:common] == ours["losses"][:common],
        "steps": common,
        "within": ours["allocated_bytes"] <= ours["budget_bytes"],
        **memory(ours),
        **{name: stats.get(name) for name in ("misses", "step_misses", "skipped_moves", "overrun_bytes")},
        **{name: stats.get(name) for name in ("to_host_bytes", "from_host_bytes", "written_bytes")},
        "said": said(ours),
    }


def judge(room: Room, found: dict[str, Figures]) -> None:
    """Raises if a row has an error, or is not equal where that was compared, or not within its budget."""
    room.note(found)
    wrong = [f"{name} {flaw}" for name, entry in found.items() for flaw in flaws(entry)]
    if wrong:
        raise RuntimeError(f"{'; '.join(wrong)}: see rows")


def flaws(entry: Figures) -> list[str]:
    found = [f"is not {verdict}" for verdict in ("equal", "within") if entry.get(verdict) is False]
    return ["has failed"] if "error" in entry else found
