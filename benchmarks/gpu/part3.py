"""Part 3: how fast. A Llama of 1.3 billion parameters in bfloat16 within parts of its plain peak; what was
predicted beside what came.

Rehearsed as training.py says.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from part1 import REHEARSAL, build, machine
from sections import Figures, Room, Section, each
from training import LIMIT, SMALL, judge, memory, on_gpu, plain, plain_peak, said, train

LARGE: Figures = {
    "shape": {
        "vocabulary": 32000,
        "hidden": 2048,
        "intermediate": 5632,
        "layers": 24,
        "heads": 16,
        "key_heads": 8,
    },
    "batch": 4,
    "length": 2048,
    "dtype": "bfloat16",
    "fused": True,
    "steps": 5,
    "deterministic": False,
    "limit": 1.5 * LIMIT,
}
ASKED = {**SMALL, "clip": None, "deterministic": False} if REHEARSAL else LARGE
PARTS = (0.4, 0.25, 0.6)


def seconds_of(run: Figures) -> float:
    return median(run["seconds"][run["first_measured"] :])


def figures(plain: Figures, run: Figures) -> Figures:
    stats: dict[str, Any] = run["stats"]
    took = seconds_of(run)
    tokens = ASKED["batch"] * ASKED["length"]
    bound, predicted = (stats.get(name, 0) / 1e9 for name in ("bound_ns", "predicted_step_ns"))
    return {
        "seconds": took,
        "tokens_per_s": tokens / took,
        "of_plain": seconds_of(plain) / took,
        "of_bound": bound / took if bound else None,
        "predicted_over_measured": predicted / took if predicted else None,
        **memory(run),
        "same_losses": run["losses"][: len(plain["losses"])] == plain["losses"][: len(run["losses"])],
        "stats": stats,
        "said": said(run),
        "reused": run.get("reused", False),
    }


def ours(room: Room, reference: Figures, own: Figures) -> Figures:
    """teraio beside the plain run; `within` is judged, and the excess is there if it is not."""
    run = train(room, {**ASKED, "way": "teraio", "peak": plain_peak(reference), **own})
    return {**figures(reference, run), "within": run["allocated_bytes"] <= run["budget_bytes"]}


def within(room: Room) -> Figures:
    """teraio at parts of the plain peak, three tiers; the profile of the first is kept."""
    on_gpu()
    reference = plain(room, ASKED)

    def case(share: float) -> Figures:
        profile = room.scratch / f"llama-{share:.0%}.profile.json.gz".replace("%", "")
        found = ours(room, reference, {"part": share, "options": {"profile": str(profile)}})
        keep(profile, room)
        return found

    cases = {f"{share:.0%}": partial(case, share) for share in PARTS}
    found = each(room, cases, {"plain": figures(reference, reference)})
    judge(room, found)
    return found


def keep(path: Path, room: Room) -> None:
    """Beside the figures, for `profiles/`: that of the first is enough."""
    if path.exists() and not list(room.keep.glob("llama-*.profile.json.gz")):
        shutil.copy(path, room.keep / path.name)


SECTIONS = (
    Section(machine, 30),
    Section(build, 180),
    Section(within, 420),
)
