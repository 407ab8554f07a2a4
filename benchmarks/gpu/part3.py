"""Part 3: how fast. A Llama of 1.3 billion parameters in bfloat16 within parts of its plain peak; what was
predicted beside what came.

Rehearsed as part 2 is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import Any

from part1 import build, machine
from part2 import REHEARSAL, SMALL, on_gpu, plain_peak, train
from sections import Figures, Room, Section

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
}
ASKED = {**SMALL, "clip": None} if REHEARSAL else LARGE
PARTS = (0.6, 0.4, 0.25)


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
        "allocated_bytes": run["allocated_bytes"],
        "reserved_bytes": run["reserved_bytes"],
        "budget_bytes": run["budget_bytes"],
        "equal": run["losses"][: len(plain["losses"])] == plain["losses"][: len(run["losses"])],
        "stats": stats,
    }


def within(room: Room) -> Figures:
    """teraio at parts of the plain peak, three tiers; the profile of the first is kept."""
    on_gpu()
    plain = train(room, {**ASKED, "way": "plain"})
    found: Figures = {"plain": figures(plain, plain)}
    for part in PARTS:
        profile = room.scratch / f"llama-{part:.0%}.profile.json.gz".replace("%", "")
        asked = {**ASKED, "way": "teraio", "part": part, "peak": plain_peak(plain)}
        found[f"{part:.0%}"] = figures(plain, train(room, {**asked, "options": {"profile": str(profile)}}))
        keep(profile, room)
    return found


def keep(path: Path, room: Room) -> None:
    """Beside the figures, for `profiles/`."""
    if path.exists():
        shutil.copy(path, room.keep / path.name)


SECTIONS = (
    Section(machine, 30),
    Section(build, 180),
    Section(within, 420),
)
