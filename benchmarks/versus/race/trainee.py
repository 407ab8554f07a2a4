"""One training in its own process.

    python -m race.trainee '{"subject": "llama-7m", "way": "teraio", "memory": 100000000, "threads": 2}'

The script reads one request per line and writes one line of JSON as its answer. (1) For a number, it runs
this number of steps and answers with a row per step. (2) For `facts`, it answers with the final figures. It
exits at the end of input. In a row, `tensors` is the peak of bytes in tensors, from a counting allocator.
`resident` is the peak of the whole process. `other` is the memory of the process after the step, without
tensors and files.
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
    """Return the bytes in the line `name` of /proc/self/status. VmHWM is the peak of resident memory. RssAnon
    is the resident memory without files.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def storage_bytes() -> dict[str, int]:
    """Return the bytes that the process has written to disks and read from disks."""
    rows = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    found = {name: int(value) for name, value in rows}
    return {"disk_written_bytes": found["write_bytes"], "disk_read_bytes": found["read_bytes"]}


class Trainee:
    def __init__(self, request: dict[str, Any]) -> None:
        ours = request["way"] == "teraio" and request.get("spares", True)
        self.counting = counting_allocator.install_over_ours() if ours else counting_allocator.install()
        torch.set_num_threads(request.get("threads", 2))
        torch.use_deterministic_algorithms(request.get("deterministic", True))
        torch.manual_seed(0)
        self.subject = subject_of(request["subject"])
        self.generator = torch.Generator().manual_seed(1)
        self.way: Way = way_of(request["way"])(self.subject, request)

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
    os.dup2(2, 1)  # libraries that print to stdout now print to stderr, so that stdout has only answers
    trainee = Trainee(json.loads(sys.argv[1]))
    for line in sys.stdin:
        answer = trainee.facts() if line.strip() == "facts" else [trainee.step() for _ in range(int(line))]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
