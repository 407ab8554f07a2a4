"""What each suite of tests may cost, and what it did cost: rows of budget.toml against measured seconds.

A suite is a file of tests, or the folder native. Its row holds seconds beside one other suite on two cores.
What is compared with the row is the smaller of wall time and CPU time: on a shared machine wall time grows
with what the neighbours do and CPU time does not, while a suite that keeps both cores busy has less wall time
than CPU time. A suite that only waits would pass for free that way, so its wall time is held too, three times
as loosely.

CPU time grows as well where neighbours share caches and cores, and on slower machines. A run of everything
knows by how much: the median suite's seconds against its row is the pace of this run, and rows count that
many times. So what is found is a suite that outgrew the others, on any machine; all of them growing together
is found beyond the slowest pace, and by benchmarks/engine/cost.py.
"""

from __future__ import annotations

import os
import statistics
import time
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# In two processes: nearly a quarter of an hour of two cores.
TOTAL_SECONDS = 900.0
GROWTH = 2.0  # the same suite took 1.6 times as long an hour later: machines are shared
FLOOR_SECONDS = 5.0  # first imports and compiles land on whichever suite runs first
WAITING = 3.0
PACES = (1.0, 6.0)  # of machines; the second half as fast as the slowest that was met
ENOUGH = 8  # suites that tell a pace, each of
TELLING_SECONDS = 5.0  # and more: imports are most of what the others take


@dataclass(frozen=True, slots=True)
class Cost:
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)

    @property
    def seconds(self) -> float:
        return min(self.wall_s, self.cpu_s)


_ELSEWHERE_S: list[float] = []


def elsewhere(cpu_s: float) -> None:
    """Count what ran for this process and is no child of it."""
    _ELSEWHERE_S.append(cpu_s)


def now() -> Cost:
    """The clocks of this process and of its children that have ended, such as compilers."""
    used = os.times()
    here = used.user + used.system + used.children_user + used.children_system
    return Cost(time.perf_counter(), here + sum(_ELSEWHERE_S))


@cache
def rows(path: Path = TESTS / "budget.toml") -> dict[str, float]:
    """Seconds by suite."""
    return {name: float(seconds) for name, seconds in tomllib.loads(path.read_text())["seconds"].items()}


def suite_of(path: Path, tests: Path = TESTS) -> str:
    """`tests/native/test_faults.py` -> `native`, `tests/formats/test_files.py` -> `test_files`."""
    return "native" if path.relative_to(tests).parts[0] == "native" else path.stem


def suites(tests: Path = TESTS) -> set[str]:
    """What pytest collects here; tests/long is for people with an afternoon."""
    return {suite_of(path, tests) for path in tests.rglob("test_*.py") if "long" not in path.parts}


def pace(budget: dict[str, float], spent: dict[str, Cost]) -> float:
    """How many times its row a suite takes in this run; a run of a few suites passes for the slowest."""
    told = [
        spent[suite].seconds / row
        for suite, row in budget.items()
        if row >= TELLING_SECONDS and suite in spent
    ]
    return min(max(statistics.median(told), PACES[0]), PACES[1]) if len(told) >= ENOUGH else PACES[1]


def complaints(budget: dict[str, float], spent: dict[str, Cost]) -> list[str]:
    """One line for each suite that costs more than its row allows; without a row, nothing is exceeded."""
    lines = []
    times = pace(budget, spent)
    for suite, cost in sorted(spent.items()):
        row = budget.get(suite)
        if row is None:
            continue
        limit = (row * GROWTH + FLOOR_SECONDS) * times
        if cost.seconds > limit or cost.wall_s > limit * WAITING:
            lines.append(
                f"{suite} took {cost.wall_s:.0f} s, {cost.cpu_s:.0f} s of CPU; its row of {row:.0f} s allows "
                f"{limit:.0f} s at this run's pace ({times:.1f}). Make it cheaper, move cases "
                "to tests/long, or take seconds from another row"
            )
    return lines
