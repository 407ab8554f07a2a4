"""Part 4: what else there is, on the training of part 3. What PyTorch does for activations, and DeepSpeed's
ZeRO-3 where it was carried: seconds and the most memory, beside the plain run and teraio at 40 %.

Rehearsed as training.py says, but for DeepSpeed, which asks for a GPU.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

from part1 import REHEARSAL, build, machine
from part3 import ASKED, figures, ours
from sections import Figures, NotSupported, Room, Section, each
from training import judge, on_gpu, plain, train

ZERO = Path(__file__).with_name("zero.py")
PART = 0.4
WAYS = ("save_on_cpu", "checkpoint", "offloading")
STREAMS = () if REHEARSAL else ("offloading_stream",)


def pytorch(room: Room) -> Figures:
    """Activations in pinned host memory by hooks, made again, or moved by the compiler, on the stream of the
    kernels or on one of their own: without a budget. The compiler's must say that it moved something."""
    on_gpu()
    reference = plain(room, ASKED)

    def case(way: str) -> Figures:
        run = train(room, {**ASKED, "way": way})
        if not way.startswith("offloading"):
            return figures(reference, run)
        if not run["offloaded_bytes"]:
            raise RuntimeError("torch's compiler has moved nothing: this would be the plain run")
        return {**figures(reference, run), "offloaded_bytes": run["offloaded_bytes"]}

    cases = {way: partial(case, way) for way in WAYS}
    cases["teraio"] = partial(ours, room, reference, {"part": PART})
    cases |= {way: partial(case, way) for way in STREAMS}
    found = each(room, cases, {"plain": figures(reference, reference)})
    judge(room, found)
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
    Section(pytorch, 360),
    Section(zero_offload, 120),
    Section(zero_infinity, 120),
)
