"""The requirements on every class of the zoo, and the table of results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from children import forked

HERE = Path(__file__).parent

MANAGED_MIN = 0.95  # least share of evictable bytes among weights and saved activations
SMALL_BYTES = 4096  # tolerance in bytes for single scalars in a peak or a floor
FLOOR_MAX = 1.1  # largest accepted ratio of the smallest working budget to the floor
HEAD = f"{'class':13} {'plain':>7} {'floor':>7} {'least':>7} {'/floor':>6} {'managed':>8}   peak/budget, MB"


def results(rows: Sequence[str], steps: int, inner: str = "eager") -> Iterator[dict[str, Any]]:
    """Train these classes in a child process. A class that crashes the child also gives a result, and another
    child trains the remaining classes.
    """
    left = list(rows)
    while left:
        request = json.dumps({"rows": left, "steps": steps, "inner": inner})
        child = forked(HERE / "zoo_child.py", request)
        for line in child.stdout.splitlines():
            if line.startswith("{"):
                result = json.loads(line)
                left.remove(result["name"])
                yield result
        if left:
            last = child.stderr.strip().splitlines()[-15:]
            yield {"name": left.pop(0), "crash": f"exit {child.returncode}\n" + "\n".join(last)}


def faults(result: dict[str, Any]) -> list[str]:
    """Return a line for each requirement that the result does not meet."""
    if "crash" in result:
        return [f"the process ended: {result['crash']}"]
    found = []
    plain, floor, smallest = result["plain"], result["floor"], result["smallest"]
    if smallest >= 0.9 * max(plain["peaks"]):
        found.append(f"no budget below 0.9 of the plain peak works, the smallest is {smallest}")
    if floor and smallest > FLOOR_MAX * floor:
        found.append(f"the smallest budget is {smallest / floor:.3f} of the floor ({result['floor_kernel']})")
    for run in result["runs"]:
        where = f"under {run['budget']}"
        if run["error"]:
            found.append(f"{where}: {run['error']}")
            continue
        if run["losses"] != plain["losses"]:
            found.append(f"{where}: losses {run['losses']}, not {plain['losses']}")
        if run["digest"] != plain["digest"]:
            found.append(f"{where}: weights, buffers or states are not those of the plain run")
        # The first step is not checked in two cases. (1) If the graph is broken, the engine learns in this
        # step how much memory eager code between the programs needs. (2) If the model is larger than the
        # budget, the model exists before the engine.
        first = result["calls"] <= 2 and run["own"] + SMALL_BYTES < run["budget"]
        peaks = run["peaks"] if first else run["peaks"][1:]
        if max(peaks) > run["budget"]:
            found.append(f"{where}: peaks {run['peaks']}")
        if max(run["peaks"]) + SMALL_BYTES < result["floor_tensors"]:
            found.append(f"{where}: peaks {run['peaks']}: below the floor of {floor}")
        if floor and run["managed"]["bytes"] < MANAGED_MIN * result["total"]:
            found.append(
                f"{where}: {run['managed']['bytes']} of {result['total']} bytes may move; "
                f"{run['managed']['stuck']} may not"
            )
    return found


def line(result: dict[str, Any]) -> str:
    """Return the result's row of the table."""
    name = f"{result['name']:13}"
    if "crash" in result:
        return f"{name} ended"
    peak, floor, smallest = max(result["plain"]["peaks"]), result["floor"], result["smallest"]
    managed = min((run["managed"]["bytes"] for run in result["runs"] if "managed" in run), default=0)
    runs = [f"{max(run['peaks'], default=0) / 1e6:.1f}/{run['budget'] / 1e6:.1f}" for run in result["runs"]]
    sizes = " ".join(f"{size / 1e6:7.1f}" for size in (peak, floor, smallest))
    against = f"{smallest / floor:6.3f} {managed / result['total']:8.1%}" if floor else f"{'':15}"
    return f"{name} {sizes} {against}   {', '.join(runs)}  {result['seconds']} s"
