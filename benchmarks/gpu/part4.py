"""Part 4: what else there is, on the training of part 3. What PyTorch does for activations, and DeepSpeed's
ZeRO-3 where it was carried: seconds and the most memory, beside the plain run and teraio at 40 %.

Rehearsed as part 2 is, but for DeepSpeed, which asks for a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from part1 import build, machine
from part2 import REHEARSAL, on_gpu, plain_peak, train
from part3 import ASKED, figures
from sections import Figures, NotSupported, Room, Section

ZERO = Path(__file__).with_name("zero.py")
PART = 0.4


def pytorch(room: Room) -> Figures:
    """Activations in pinned host memory by hooks, by the compiler, or made again: without a budget."""
    on_gpu()
    plain = train(room, {**ASKED, "way": "plain"})
    found = {"plain": figures(plain, plain)}
    for way in ("save_on_cpu", "offloading", "checkpoint"):
        found[way] = figures(plain, train(room, {**ASKED, "way": way}))
    asked = {**ASKED, "way": "teraio", "part": PART, "peak": plain_peak(plain)}
    found["teraio"] = figures(plain, train(room, asked))
    return found


def zero_offload(room: Room) -> Figures:
    return _zero(room, "zero-offload")


def zero_infinity(room: Room) -> Figures:
    return _zero(room, "zero-infinity")


def _zero(room: Room, way: str) -> Figures:
    if importlib.util.find_spec("deepspeed") is None:
        raise NotSupported("deepspeed is not installed: collect_wheels.sh --deepspeed carries it")
    if REHEARSAL:
        raise NotSupported("DeepSpeed's part is for a GPU")
    on_gpu()
    folder = room.scratch / way
    folder.mkdir()
    run = train(room, {**ASKED, "way": way, "folder": str(folder)}, script=ZERO)
    return figures(run, run)  # its weights are in single precision, so its losses are its own


SECTIONS = (
    Section(machine, 30),
    Section(build, 180),
    Section(pytorch, 240),
    Section(zero_offload, 120),
    Section(zero_infinity, 120),
)
