"""A sweep of many generated models in a few child processes. Each model gives a dictionary of results."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("differential_run.py")
TAIL = 3000  # characters that are kept from the end of a child's output


@dataclass(frozen=True, slots=True)
class Named:
    """The seeds of models that are in every sweep in addition to random models, and the models' largest
    number of blocks.
    """

    seeds: tuple[int, ...]
    most_blocks: int


NAMED = {
    "eager": Named((*range(49), 10_147), 3),
    # Together these models have (1) convolution and attention, (2) dropout and a mixture of experts, (3)
    # views and checkpoints, (4) buffers and in-place operators, and (5) tied weights and experts. A model has
    # at most two blocks, because Inductor takes seconds per block.
    "inductor": Named((1060, 1020, 1043, 1031, 1083), 2),
}


def sweep(
    seeds: Iterable[int], jobs: int = 2, per_child: int = 50, script: Path = CHILD, **request: Any
) -> Iterator[dict[str, Any]]:
    """Yield one result per seed, in the order in which the models end. If a child process dies, its current
    seed gets an error as result, and another child continues with the next seed. The children run `script`.
    """
    chunks: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    seeds = list(seeds)
    for first in range(0, len(seeds), per_child):
        chunks.put(seeds[first : first + per_child])
    results: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    workers = [
        threading.Thread(target=_work, args=(chunks, results, script, request), daemon=True)
        for _ in range(jobs)
    ]
    for worker in workers:
        worker.start()
    running = len(workers)
    while running:
        result = results.get()
        if result is None:
            running -= 1
        else:
            yield result


def _work(
    chunks: queue.SimpleQueue[list[int]],
    results: queue.SimpleQueue[dict[str, Any] | None],
    script: Path,
    request: dict[str, Any],
) -> None:
    try:
        while True:
            left = chunks.get_nowait()
            while left:
                left = _child(left, results, script, request)
    except queue.Empty:
        pass
    finally:
        results.put(None)


def _child(
    seeds: list[int],
    results: queue.SimpleQueue[dict[str, Any] | None],
    script: Path,
    request: dict[str, Any],
) -> list[int]:
    """Run a child process and queue its results. Return the seeds for which no result is queued."""
    command = [sys.executable, "-X", "faulthandler", str(script), json.dumps({**request, "seeds": seeds})]
    left = list(seeds)
    printed: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        listener = threading.Thread(target=printed.extend, args=(child.stderr,), daemon=True)
        listener.start()
        for line in child.stdout:
            result = json.loads(line)
            results.put(result)
            if result["plant"] == request.get("plants", [""])[-1]:
                left.pop(0)
        listener.join()
    if child.returncode or left:
        error = f"the process ended with {child.returncode}: {''.join(printed)[-TAIL:]}"
        results.put(
            {
                "seed": left[0] if left else -1,
                "what": "",
                "rows": [],
                "unstable": [],
                "untraced": "",
                "error": error,
            }
        )
    return left[1:]


def complaints(result: dict[str, Any]) -> list[str]:
    """Return one line for each fault in the results of one model."""
    name = f"seed {result['seed']} ({result['what']})"
    found = [f"{name}: {result['error']}"] if result["error"] else []
    for row in result["rows"]:
        where = f"{name}, plan {row['plan']} at {row['budget_bytes']} bytes"
        if row["error"]:
            found.append(f"{where}: {row['error']}")
        if row["differences"]:
            found.append(f"{where}: other bits in {row['differences']}")
        if row["plan"] >= 0 and row["moved"] < row["share"]:
            found.append(f"{where}: moved {row['moved']} of the gap bytes, {row['share']} were requested")
    return found


def totals(results: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return the sums over all results: models, plans, faults and moves."""
    keys = ("planned", "skipped", "misses", "early", "fetches", "evictions", "drops")
    results = list(results)
    rows = [row for result in results for row in result["rows"]]
    planned = [row for row in rows if row["plan"] >= 0]
    return {
        "models": len(results),
        "plans": len(planned),
        "complaints": sum(len(complaints(result)) for result in results),
        "unstable": sum(bool(result["unstable"]) for result in results),
        "untraced": sum(bool(result["untraced"]) for result in results),
        **{key: sum(row[key] for row in planned) for key in keys},
        "misses on demand": sum(row["misses"] for row in rows if row["plan"] < 0),
        "most over": max((row["over_bytes"] for row in rows if not row["error"]), default=0),
    }
