"""Two training processes whose steps alternate, and the evaluation of their times. Steps alternate so that
other load on the machine affects both processes.

A pair has equally many steps of both processes, enough to fill some seconds. One step of a tenth of a second
is too short, because other load would decide its length.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, Self

VERSUS = Path(__file__).resolve().parents[1]
ROOT = VERSUS.parents[1]
FOUND = os.pathsep.join(map(str, (VERSUS, ROOT / "tests" / "support", ROOT)))
SETTLE_LEAST, SETTLE_MOST = 3, 24  # smallest and largest number of steps before the timed steps
SPREAD_MOST = 0.05  # largest `spread()` that allows a verdict
PAIRS_LEAST = 9
PAIR_S, STEPS_MOST = 12.0, 12  # seconds of a pair, and largest number of steps of each trainee in a pair

Row = dict[str, Any]


class Died(Exception):
    """The error for a trainee that ended early. It has the end of the trainee's output."""


class Trainee:
    """A training in a child process.

    `before` is the start of the child's command line, for example a program that limits memory.
    """

    def __init__(
        self, request: dict[str, Any], before: Sequence[str] = (), python: str = sys.executable
    ) -> None:
        self.asked, self.rows = request, list[Row]()
        environment = {**os.environ, "TERAIO_CACHE_DIR": "off", "TERAIO_LOG": "warning", "PYTHONPATH": FOUND}
        self.process = subprocess.Popen(
            [*before, python, "-m", "race.trainee", json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, what: str) -> Any:
        process = self.process
        assert process.stdin and process.stdout and process.stderr
        try:
            process.stdin.write(what + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Died(f"{self.asked}: exit code {process.wait()}: {process.stderr.read()[-1500:]}")
        return json.loads(answer)

    def steps(self, count: int) -> list[Row]:
        rows: list[Row] = self.ask(str(count))
        self.rows += rows
        return rows

    def settle(self) -> Self:
        """Run steps until the trainee reports that all further steps are alike. Raise `Died` if this takes
        too long.
        """
        self.steps(SETTLE_LEAST)
        while not all(row["settled"] for row in self.rows[-2:]):
            if len(self.rows) >= SETTLE_MOST:
                raise Died(f"{self.asked}: not settled after {SETTLE_MOST} steps")
            self.steps(1)
        return self

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("facts")
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass(slots=True)
class Race:
    """A race of `ours` against `theirs`, in pairs. In a pair, the steps of both trainees alternate, and each
    trainee takes `steps` steps.
    """

    steps: int = 1
    ours: list[Row] = field(default_factory=list)
    theirs: list[Row] = field(default_factory=list)

    def ratios(self) -> list[float]:
        return [one / other for one, other in zip(self._seconds(self.ours), self._seconds(self.theirs))]

    def _seconds(self, rows: list[Row]) -> list[float]:
        """Return the seconds of all steps of each pair."""
        firsts = range(0, len(rows), self.steps)
        return [sum(row["seconds"] for row in rows[first : first + self.steps]) for first in firsts]

    def ratio(self) -> float:
        return median(self.ratios())

    def spread(self) -> float:
        """Return the distance of the ratios' quartiles, divided by their median."""
        low, _, high = quantiles(self.ratios(), n=4)
        return (high - low) / self.ratio()

    def middle(self, whose: Literal["ours", "theirs"]) -> float:
        """Return the median seconds of a step of the trainee `whose`."""
        return median(row["seconds"] for row in getattr(self, whose))

    def figures(self, theirs: str, ours: str = "ours") -> Row:
        """Return the figures of a row. `theirs` and `ours` are the trainees' names in the keys."""
        return {
            f"{theirs}_s": self.middle("theirs"),
            f"{ours}_s": self.middle("ours"),
            "ratio": self.ratio(),
            "spread": self.spread(),
            "ratios": [round(ratio, 4) for ratio in self.ratios()],
        }

    def verdict(self, goal: float) -> str:
        """Return "met" or "missed" for a largest ratio, or "not resolved here" if the ratios vary too
        much.
        """
        if len(self.ours) < PAIRS_LEAST * self.steps or self.spread() > SPREAD_MOST:
            return "not resolved here"
        return "met" if self.ratio() <= goal else "missed"


def plain_peak(subject: str, threads: int) -> int:
    """Return the peak bytes of tensors without a budget."""
    with Trainee({"subject": subject, "way": "plain", "threads": threads}) as plain:
        return most(plain.settle().rows, "tensors")


def race(ours: Trainee, theirs: Trainee, pairs: int) -> Race:
    """Run both trainees alternately; the trainee that steps first changes with every pair."""
    lately_s = median(row["seconds"] for row in theirs.rows[-3:])
    found = Race(min(max(round(PAIR_S / 2 / lately_s), 1), STEPS_MOST))
    for number in range(pairs * found.steps):
        for one in (ours, theirs) if number % 2 else (theirs, ours):
            rows = found.ours if one is ours else found.theirs
            rows += one.steps(1)
    return found


def equal_losses(one: Trainee, other: Trainee) -> bool:
    """Return True if the losses of all common steps are equal and there is at least one such step."""
    both = list(zip(one.rows, other.rows))
    return bool(both) and all(a["loss"] == b["loss"] for a, b in both)


def middle(rows: Sequence[Row], name: str) -> float:
    return median(row[name] for row in rows)


def most(rows: Sequence[Row], name: str) -> int:
    return max(int(row[name]) for row in rows)
