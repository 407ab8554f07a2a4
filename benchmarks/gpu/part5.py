"""Part 5: the optimizer's step on the host, on the training of part 3: beside the plain run, at 40 %, on the
device, on the host with all threads, and where the plan says.

Rehearsed as training.py says, but for the host, which on a CPU is the device.
"""

from __future__ import annotations

import os
from functools import partial

from part1 import REHEARSAL, build, machine
from part3 import ASKED, figures, ours
from part4 import PART
from sections import Figures, Room, Section, each
from training import judge, on_gpu, plain

WAYS = ("device", "auto") if REHEARSAL else ("host", "device", "auto")


def host_step(room: Room) -> Figures:
    on_gpu()
    reference = plain(room, ASKED)
    own = {"part": PART, "threads": 1 if REHEARSAL else os.cpu_count()}
    cases = {way: partial(ours, room, reference, {**own, "options": {"optimizer_step": way}}) for way in WAYS}
    found = each(room, cases, {"plain": figures(reference, reference)})
    judge(room, found)
    return found


SECTIONS = (
    Section(machine, 30),
    Section(build, 180),
    Section(host_step, 320),
)
