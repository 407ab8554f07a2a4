"""The CPU time of the process as the planners' clock. Figures are then independent of other load on the
machine.

`use()` makes the planners read this process's CPU time instead of wall time. On an idle machine `use()`
changes no result, because planning is one thread that never sleeps. Only the exact solver may give another
result.
"""

from __future__ import annotations

import sys
from time import monotonic_ns, process_time, process_time_ns
from typing import Any

import teraio._native
from teraio.passes import planner
from teraio.passes.planner.bound import bound, certificate, placements
from teraio.passes.planner.bound.rows import Rows

_Search = teraio._native.Search
# A solver stops at a limit in wall time. On a busy machine it gets less CPU time in this time. So its limit
# in wall time is this many times the limit in CPU time.
BUSY = 5.0


class Search:
    """The native search with a deadline in CPU time. The class converts the deadline to the search's steady
    clock.
    """

    def __init__(self, *given: Any) -> None:
        self._search = _Search(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._search, name)

    def run(self, rounds: int, until_ns: int, heat: float) -> int:
        left_ns = max(until_ns - process_time_ns(), 1)
        return self._search.run(rounds, monotonic_ns() + left_ns if until_ns else 0, heat)


def solve_relaxation(rows: Rows, time_limit_s: float) -> certificate.Solution | None:
    """Solve with a limit in wall time that is longer than the limit in CPU time, also on a busy machine."""
    return certificate.solve_relaxation(rows, BUSY * time_limit_s)


def use() -> None:
    """Make planners of this process read CPU time instead of wall time, until the process ends."""
    clocks = {"monotonic": process_time, "monotonic_ns": process_time_ns}
    for name, module in sys.modules.items():
        if name.startswith(f"{planner.__name__}."):
            for clock, ours in clocks.items():
                if hasattr(module, clock):
                    setattr(module, clock, ours)
    bound.solve_relaxation = placements.solve_relaxation = solve_relaxation
    teraio._native.Search = Search  # type: ignore[misc, assignment]
