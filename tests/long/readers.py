"""A run of threads, finalizers and signals that read weights while a model trains in a small budget.

    python tests/long/readers.py [--seconds 600] [--threads 8] [--memory 5MiB]

The learning rate is 0, so each sum of a weight must equal the sum at the start. The script prints lines `name
value target PASS|FAIL`, and exits with 1 if a line says FAIL. If a step takes longer than a minute, the
script counts a hang and ends the process.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
os.environ["TERAIO_CACHE_DIR"] = "off"

import torch
from observer_child import LAYERS, Finalizer, Reader, World
from says import at_least, exactly

HANG_S = 60
SIGNAL_S = 0.05


class Readers:
    """Readers of the weights of a training. They count their reads, and list wrong results."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.wrong: list[str] = []
        self.reads = {"operator": 0, "address": 0, "extension": 0, "signal": 0}
        self.finalized: list[float] = []
        self.reader = Reader(held=False)
        self.ends = threading.Event()

    def compare(self, way: str, at: int, found: float | str) -> None:
        self.reads[way] += 1
        if not isinstance(found, float) or abs(found - self.world.sums[at]) > 1e-3:
            self.wrong.append(f"{way} {at}: {found}")

    def runs(self, number: int) -> None:
        """Read weights in a thread, in three ways: by operators of torch, by a C++ extension, and by
        address."""
        turn = number
        while not self.ends.is_set():
            turn = turn * 5 + 3
            at, weight = turn % LAYERS, self.world.weights[turn % LAYERS]
            try:
                match turn // LAYERS % 3:
                    case 0:
                        self.compare("operator", at, float(weight.detach().double().sum()))
                    case 1:
                        self.compare("extension", at, self.reader.one("const_data", weight))
                    case _:
                        taken = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
                        self.compare("address", at, float(sum(taken)))
            except Exception as error:  # noqa: BLE001
                self.wrong.append(f"{type(error).__name__}: {error}")

    def handles(self, *_: Any) -> None:
        self.compare("signal", 0, float(self.world.weights[0].detach().double().sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--memory", default="5MiB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = World(args.memory)
    readers = Readers(world)
    signal.signal(signal.SIGALRM, readers.handles)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_S, SIGNAL_S)
    threads = [threading.Thread(target=readers.runs, args=(number,)) for number in range(args.threads)]
    for thread in threads:
        thread.start()
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < args.seconds:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        for weight in world.weights:
            Finalizer(weight, readers.finalized)
        world.step()
        gc.collect()
        steps += 1
    readers.ends.set()
    for thread in threads:
        thread.join(HANG_S)
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.collect()
    odd = [f"finalizer: {found}" for found in readers.finalized if found not in world.sums]
    figures = [
        exactly("wrong reads", len(readers.wrong) + len(odd)),
        exactly("threads that hang", sum(thread.is_alive() for thread in threads)),
        exactly("finalizers that did not run", steps * LAYERS - len(readers.finalized)),
        at_least("steps", steps, 1),
        *(at_least(f"reads by {way}", count, 1) for way, count in readers.reads.items()),
    ]
    for line in (*readers.wrong[:3], *odd[:3]):
        print(line, file=sys.stderr)
    return 0 if all(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
