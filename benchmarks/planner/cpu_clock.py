"""Time limits of planning by seconds of CPU: so that figures do not depend on what else the machine does.

`use()` makes the planners read this process's CPU time where they read a clock. On an idle machine it changes
nothing: planning is one thread that never sleeps, but for the exact solver's.
"""

from __future__ import annotations

import sys
from time import monotonic_ns, process_time, process_time_ns
from typing import Any

import teraio._native
from teraio.passes import planner
from teraio.passes.planner.bound import bound, certificate
from teraio.passes.planner.bound.rows import Rows

_Search = teraio._native.Search
BUSY = 5.0  # how much longer than its CPU time a solver may take, whose own limit is by the steady clock


class Search:
    """The native search, which looks at the steady clock: its deadline is put where CPU time would be."""

    def __init__(self, *given: Any) -> None:
        self._search = _Search(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._search, name)

    def run(self, rounds: int, until_ns: int, heat: float) -> int:
        left_ns = max(until_ns - process_time_ns(), 1)
        return self._search.run(rounds, monotonic_ns() + left_ns if until_ns else 0, heat)


def solve_relaxation(rows: Rows, time_limit_s: float) -> certificate.Solution | None:
    """Solve it with a limit that a busy machine does not reach before the process's CPU time is up."""
    return certificate.solve_relaxation(rows, BUSY * time_limit_s)


def use() -> None:
    """Have planners read CPU time instead of a clock: in this process, until it ends."""
    clocks = {"monotonic": process_time, "monotonic_ns": process_time_ns}
    for name, module in sys.modules.items():
        if name.startswith(f"{planner.__name__}."):
            for clock, ours in clocks.items():
                if hasattr(module, clock):
                    setattr(module, clock, ours)
    bound.solve_relaxation = solve_relaxation
    teraio._native.Search = Search  # type: ignore[misc, assignment]
