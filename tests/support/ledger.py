"""The cost limits of test suites, which compare measured seconds with the rows of budget.toml.

A suite is a file of tests, or the folder native. The suite's row holds the seconds that the suite takes on
two cores while another suite runs. The row is compared with the smaller of wall time and CPU time, for two
reasons. On a shared machine, other load mainly increases wall time. A suite that keeps both cores busy has
less wall time than CPU time.

A suite that only waits uses no CPU time, so this comparison does not detect it. Wall time therefore also has
a limit of its own, three times as high.

CPU time increases on slower machines, and where other processes share caches and cores. A run of all suites
measures this increase as the run's pace: the median of the suites' seconds divided by their rows. All rows
are multiplied by the pace. A suite that became slower than the others exceeds its row, on any machine. If all
suites become slower together, the limit of the pace and benchmarks/engine/cost.py detect it.
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
# The most seconds that all rows may have together. Two test processes then take nearly a quarter of an hour
# on two cores.
TOTAL_SECONDS = 900.0
# A suite may take so many times the seconds in its row. On a shared machine, one suite took 1.6 times as long
# as an hour before.
GROWTH = 2.0
FLOOR_SECONDS = 5.0  # allowed in addition to each row, because the first suite pays for imports and compiles
WAITING = 3.0
PACES = (1.0, 6.0)  # limits of the pace; the slowest machine so far had a pace of 3
ENOUGH = 8  # least number of suites from which a pace is measured
TELLING_SECONDS = 5.0  # smallest row of a suite that measures the pace; imports dominate shorter suites


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
    """Add the CPU time of a process that worked for this process and is not its child."""
    _ELSEWHERE_S.append(cpu_s)


def now() -> Cost:
    """Return the wall time and the CPU time so far of this process and of its ended children, such as
    compilers.
    """
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    return Cost(time.perf_counter(), cpu_s + sum(_ELSEWHERE_S))


@cache
def rows(path: Path = TESTS / "budget.toml") -> dict[str, float]:
    """Return the budgeted seconds by suite."""
    return {name: float(seconds) for name, seconds in tomllib.loads(path.read_text())["seconds"].items()}


def suite_of(path: Path, tests: Path = TESTS) -> str:
    """Return the suite of a test file.

    `tests/native/test_faults.py` gives `native`, `tests/formats/test_files.py` gives `test_files`.
    """
    return "native" if path.relative_to(tests).parts[0] == "native" else path.stem


def suites(tests: Path = TESTS) -> set[str]:
    """Return the suites that pytest collects in `tests`. tests/long is left out, because it takes hours."""
    return {suite_of(path, tests) for path in tests.rglob("test_*.py") if "long" not in path.parts}


def pace(budget: dict[str, float], spent: dict[str, Cost]) -> float:
    """Return the run's pace, the median factor by which suites exceed their rows. If a run has too few suites
    to measure the pace, return the largest accepted pace.
    """
    ratios = [
        spent[suite].seconds / row
        for suite, row in budget.items()
        if row >= TELLING_SECONDS and suite in spent
    ]
    return min(max(statistics.median(ratios), PACES[0]), PACES[1]) if len(ratios) >= ENOUGH else PACES[1]


def complaints(budget: dict[str, float], spent: dict[str, Cost]) -> list[str]:
    """Return a line for each suite that costs more than its row allows. A suite without a row has no
    limit.
    """
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
