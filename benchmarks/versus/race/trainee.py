"""One training in a process of its own.

    python -m race.trainee '{"subject": "llama-7m", "way": "teraio", "memory": 100000000, "threads": 2}'

Reads a line at a time: a number is so many steps, answered with a JSON list of one row per step; `facts` is
answered with what is known at the end; the end of input ends it. `tensors` in a row is the peak of bytes in
tensors, by an allocator that counts; `resident` that of the whole process; `other` what it holds after the
step that is neither tensor nor file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import counting_allocator
import torch

from race.models import subject_of
from race.ways import Way, way_of


def status_bytes(name: str) -> int:
    """A line of /proc/self/status: VmHWM is the most that was resident, RssAnon what is now, but files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def storage_bytes() -> dict[str, int]:
    """What the process had its disks write and read, whoever asked for it."""
    rows = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = {name: int(value) for name, value in rows}
    return {"disk_written_bytes": found["write_bytes"], "disk_read_bytes": found["read_bytes"]}


class Trainee:
    def __init__(self, asked: dict[str, Any]) -> None:
        ours = asked["way"] == "teraio" and asked.get("spares", True)
        self.counting = counting_allocator.install_over_ours() if ours else counting_allocator.install()
        torch.set_num_threads(asked.get("threads", 2))
        torch.use_deterministic_algorithms(asked.get("deterministic", True))
        torch.manual_seed(0)
        self.subject = subject_of(asked["subject"])
        self.generator = torch.Generator().manual_seed(1)
        self.way: Way = way_of(asked["way"])(self.subject, asked)

    def sums(self) -> dict[str, int]:
        return {**storage_bytes(), **self.way.figures()}

    def step(self) -> dict[str, Any]:
        batch = self.subject.batch(self.generator)
        before = self.sums()
        Path("/proc/self/clear_refs").write_text("5")
        self.counting.reset_peak()
        began = time.perf_counter()
        loss = self.way.step(batch)
        seconds = time.perf_counter() - began
        moved = {name: value - before.get(name, 0) for name, value in self.sums().items()}
        return {
            "seconds": seconds,
            "loss": float(loss.item()).hex(),
            "tensors": self.counting.peak_bytes(),
            "resident": status_bytes("VmHWM"),
            "other": status_bytes("RssAnon") - self.counting.alive_bytes(),
            "settled": self.way.settled(),
            **moved,
        }

    def facts(self) -> dict[str, Any]:
        found = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        if "teraio.session.session" in sys.modules:
            from race.bounds import bounds

            found.update(bounds(self.step))
        return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    trainee = Trainee(json.loads(sys.argv[1]))
    for line in sys.stdin:
        answer = trainee.facts() if line.strip() == "facts" else [trainee.step() for _ in range(int(line))]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
