"""Part 5: the optimizer's step on the host, on the training of part 3: beside the plain run, at 40 %, on the
device, on the host with all threads, and where the plan says.

Rehearsed as part 2 is, but for the host, which on a CPU is the device.
"""

from __future__ import annotations

import os

from part1 import build, machine
from part2 import REHEARSAL, on_gpu, plain_peak, train
from part3 import ASKED, figures
from part4 import PART
from sections import Figures, Room, Section

WAYS = ("device", "auto") if REHEARSAL else ("device", "host", "auto")


def host_step(room: Room) -> Figures:
    on_gpu()
    plain = train(room, {**ASKED, "way": "plain"})
    asked = {**ASKED, "way": "teraio", "part": PART, "peak": plain_peak(plain), "threads": os.cpu_count()}
    runs = {way: train(room, {**asked, "options": {"optimizer_step": way}}) for way in WAYS}
    return {"plain": figures(plain, plain), **{way: figures(plain, run) for way, run in runs.items()}}


SECTIONS = (
    Section(machine, 30),
    Section(build, 180),
    Section(host_step, 300),
)
