"""Trainings of random loops with late updates at random places. All that user code sees must equal a plain
training, bit for bit.

    late_run.py '{"seeds": [0, 1, 2], "plants": [""], "works": false, "backward": false}'

With "works", user code also scales gradients, and asks for their norms, before the optimizers step. With
"backward", updates run in the backward. Most loops keep to their assumptions, and must have no error. If
another loop has one, all that user code has seen before must be equal.
The script prints one JSON object per seed: what the loop does, the first difference, and the engine's counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import counting_allocator
import late_loops
import steady
import torch
from late_plants import planted

import teraio
from teraio.errors import BackwardUpdateError, BudgetError, TeraioError
from teraio.runtime.engine import backward_updates, engine
from teraio.runtime.engine.backward_updates import BackwardUpdates
from teraio.runtime.engine.late_updates import LateUpdates

WORKS = BACKWARD = False  # WORKS: user code works on gradients; BACKWARD: updates run in the backward
KEPT_BYTES = 4 * 2**20  # the engine's reserve on a CPU, with its slabs


def draws_places(seed: int) -> Any:
    """Return a replacement of `is_chosen`: which updates run late is random. In half of all seeds, the choice
    changes with each step.
    """

    def is_chosen(self: LateUpdates, kernel: str, weights: Any) -> bool:
        assert engine.ENGINE is not None
        step = engine.ENGINE.meter.begun if seed % 2 else 0
        digest = hashlib.sha256(f"{seed} {step} {kernel}".encode()).digest()
        return kernel not in self.unfit and digest[0] < 200

    return is_chosen


def compiled_plainly(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="teraio", options={"inner": "eager"})


def options_of(seed: int, total_bytes: int, smallest: bool) -> dict[str, Any]:
    share = late_loops.Plan.of(seed).budget
    memory: Any = "min" if smallest or not share else KEPT_BYTES + int(total_bytes * (0.4 + share))
    planner = "greedy" if seed % 3 else "none"
    return {
        "memory": memory,
        "inner": "eager",
        "warmup": 1,
        "planning": "inline",
        "planner": planner,
        "updates": "backward" if BACKWARD else "late",
    }


def plain_outcome(seed: int) -> tuple[list[Any], int]:
    """Return what a plain training sees, and the bytes of its weights, gradients and states."""
    torch._dynamo.reset()
    with patch.dict("os.environ", {"TERAIO_DISABLE": "1"}):
        run = late_loops.make_run(seed, compiled_plainly, BACKWARD)
        seen = late_loops.train(seed, run, WORKS, BACKWARD)
    held = sum(p.nbytes * 2 for p in run.parameters()) + sum(value.nbytes for _, _, value in run.states())
    return seen, held


class Refusals:
    """The first error of a loop that breaks an assumption of updates in the backward. `seen` is the number of
    things that user code had seen before, or None without an error.
    """

    def __init__(self) -> None:
        self.run: late_loops.Run | None = None
        self.seen: int | None = None
        self.text = ""

    def error(self, text: str) -> BackwardUpdateError:
        if self.seen is None and self.run is not None:
            self.seen, self.text = len(self.run.seen), text
        return BackwardUpdateError(text)


def our_outcome(
    seed: int, total_bytes: int, smallest: bool, refusals: Refusals
) -> tuple[list[Any], dict[str, Any]]:
    torch._dynamo.reset()
    options = options_of(seed, total_bytes, smallest)
    kind = BackwardUpdates if BACKWARD else LateUpdates
    try:
        with (
            patch.object(kind, "is_chosen", draws_places(seed)),
            patch.object(backward_updates, "BackwardUpdateError", refusals.error),
        ):
            compile_ = partial(torch.compile, backend="teraio", options=options)
            refusals.run = run = late_loops.make_run(seed, compile_, BACKWARD)
            try:
                late_loops.train(seed, run, WORKS, BACKWARD)
            except Exception:
                if refusals.seen is None:
                    raise
        return run.seen, dict(teraio.stats())
    finally:
        with contextlib.suppress(TeraioError):  # the updates of a loop that has ended between
            teraio.reset()


def difference(plain: list[Any], ours: list[Any]) -> str:
    for at, (one, other) in enumerate(zip(plain, ours)):
        if one != other:
            done = [entry[1] for entry in plain[:at] if entry[0] == "action"]
            return f"{one} and {other}, after {done[-4:]}"[:600]
    return "" if len(plain) == len(ours) else f"{len(plain)} and {len(ours)} entries"


def compare(seed: int, plants: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a result for each plant. If the plain training fails, or differs from itself, `unstable` tells
    how.
    """
    result: dict[str, Any] = {
        "seed": seed,
        "what": late_loops.Plan.of(seed).what,
        "counts": {},
        "unstable": "",
        "difference": "",
    }
    try:
        plain, total_bytes = plain_outcome(seed)
    except Exception as error:  # noqa: BLE001  the loop fails without teraio, too
        failure = f"{type(error).__name__}: {error}"[:200]
        yield from ({**result, "unstable": failure, "plant": plant} for plant in plants)
        return
    for plant in plants:
        found = {**result, "plant": plant, **compare_with(plain, seed, total_bytes, plant)}
        if found["difference"] and not plant:
            found["unstable"] = difference(plain, plain_outcome(seed)[0])
        yield found


def compare_with(plain: list[Any], seed: int, total_bytes: int, plant: str) -> dict[str, Any]:
    refusals = Refusals()
    try:
        with planted(plant):
            try:
                ours, counts = our_outcome(seed, total_bytes, False, refusals)
            except BudgetError:
                ours, counts = our_outcome(seed, total_bytes, True, refusals)
    except Exception:  # noqa: BLE001  every error of a training is a difference
        return {"difference": traceback.format_exc()[-1500:]}
    names = ["owed_updates", "late_updates", "settled_updates", "fetches", "overrun_bytes"]
    names += ["owed_scalings", "remembered_norms", "backward_updates"]
    found = {name: counts[name] for name in names} | {"refused_loops": int(refusals.seen is not None)}
    if refusals.seen is not None:
        if late_loops.Plan.in_backward(seed)[1]:  # the loop keeps to the assumptions
            return {"difference": refusals.text, "counts": found}
        plain, ours = plain[: refusals.seen], ours[: refusals.seen]
    return {"difference": difference(plain, ours), "counts": found}


def main() -> None:
    global WORKS, BACKWARD
    request = json.loads(sys.argv[1])
    WORKS, BACKWARD = request.get("works", False), request.get("backward", False)
    counting_allocator.install()
    torch.set_num_threads(1)
    steady.plans()
    for seed in request["seeds"]:
        for result in compare(seed, request.get("plants", [""])):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
