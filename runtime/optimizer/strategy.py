"""Strategies of optimizers. A strategy decides how one optimizer may be stepped. It also keeps the programs
of the optimizer's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from teraio import switches
from teraio.formats.schedule import Schedule

from ..step.program import Program
from . import late_step, trial

log = logging.getLogger("teraio")

# The parameters of a bucket take 1/64 of the budget. With its gradients, states and temporaries, a bucket
# takes about 1/10 of the budget.
BUDGET_PARTS = 64
BUCKET_MIN_BYTES, BUCKET_MAX_BYTES = 64 * 2**10, 32 * 2**20
PROGRAMS_MAX = 16

# Optimizers whose trial is running. A trial steps clones. The engine does not count these steps as steps of
# the user.
TRYING: list[torch.optim.Optimizer] = []


@contextmanager
def mark_on_trial(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    TRYING.append(optimizer)
    try:
        yield
    finally:
        TRYING.pop()


class Strategy:
    """The way in which one optimizer is stepped, and the programs of its steps."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen = trial.Outcome(None)
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.tried_key: tuple[Any, ...] | None = None
        # Number of the optimizer's parameters when the engine registered all of them; 0 before that.
        self.registered_count = 0
        self.by_rows: bool | None = None  # True: slices are possible; None: not tried yet
        self.runs_late: bool | None = None  # True: updates may run late; None: not tried yet
        # Name of a weight -> by how much one update raises the versions of the weight and of its states.
        self.versions: dict[str, tuple[int, ...]] = {}
        self.in_buckets = False  # True: the user requires steps in buckets
        self.limit_bytes = 0
        self.reported: set[str] = set()

    def require_buckets(self, required: bool) -> None:
        """Set whether the user requires steps in buckets (some parameters at a time). If buckets are required
        but impossible, a step raises an error."""
        self.in_buckets = required

    def note_registered(self, count: int) -> None:
        """Record the number of parameters that the optimizer had when the engine registered all of them."""
        self.registered_count = count

    def bucket_limit_bytes(self, budget_bytes: int) -> int:
        """Return the largest number of bytes that the parameters of a bucket may have. The first call sets
        this limit from the budget, and later budgets do not change it. With another limit, the step would
        have other buckets, and the engine would not recognize the step."""
        if not self.limit_bytes:
            self.limit_bytes = min(max(budget_bytes // BUDGET_PARTS, BUCKET_MIN_BYTES), BUCKET_MAX_BYTES)
        return self.limit_bytes

    def run_trial_if_changed(self, optimizer: torch.optim.Optimizer) -> None:
        """Run the trial of this optimizer before its first step. The trial decides whether the optimizer may
        be stepped in buckets. Run it again if the optimizer's groups or other options have changed."""
        if trial.trial_key(optimizer, self.seen.counts) != self.tried_key:
            self.by_rows = self.runs_late = None
            self.versions.clear()
            with mark_on_trial(optimizer):
                self.seen = self._try_in_buckets(optimizer)
            self.tried_key = trial.trial_key(optimizer, self.seen.counts)

    def _try_in_buckets(self, optimizer: torch.optim.Optimizer) -> trial.Outcome:
        if "buckets" in switches.disabled_features():
            seen = trial.Outcome(f"{switches.VARIABLE} names buckets")
        else:
            seen = trial.try_in_buckets(optimizer)
        if seen.reason is not None:
            self.warn_of_whole_step(optimizer, seen.reason)
        return seen

    def warn_of_whole_step(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Warn that the optimizer steps all of its parameters together. Warn only once for each reason."""
        if reason not in self.reported:
            self.reported.add(reason)
            log.warning(
                "teraio: %s steps all of its parameters at once (%s): all gradients and states are in memory "
                "during the step",
                type(optimizer).__name__,
                reason,
            )

    def can_step_by_rows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a parameter may be stepped some rows at a time. The first call of this method runs a
        trial, so call it only if no other split fits."""
        if self.by_rows is None:
            with mark_on_trial(optimizer):
                self.by_rows = trial.can_step_by_rows(optimizer)
            if self.by_rows:
                log.info(
                    "teraio: %s steps its largest parameters some rows at a time: a whole parameter and the "
                    "temporaries of its update do not fit in memory together",
                    type(optimizer).__name__,
                )
        return self.by_rows

    def can_run_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the update of a bucket may run after `step()` has returned. The first call of this
        method runs a trial."""
        if self.runs_late is None:
            with mark_on_trial(optimizer):
                reason = late_step.reason_against_late_updates(optimizer, self.seen)
            self.runs_late = reason is None
            if reason is not None:
                self.report_no_late_updates(optimizer, reason)
        return self.runs_late

    def report_no_late_updates(
        self, optimizer: torch.optim.Optimizer, reason: str, place: str = "in the next forward"
    ) -> None:
        """Log that updates of this optimizer run at `step()`, and not at `place`. Log each reason only
        once."""
        if (text := f"{place}: {reason}") not in self.reported:
            self.reported.add(text)
            log.info(
                "teraio: updates of %s run at step(), not %s: %s", type(optimizer).__name__, place, reason
            )

    def note_versions(self, name: str, raised: tuple[int, ...]) -> None:
        """Record by how much one update of this weight raises the versions of its tensors."""
        self.versions[name] = raised

    def cached_program(self, key: tuple[Any, ...], schedule: Callable[[], Schedule]) -> Program:
        """Return the program for this key. Call `schedule` only if no program with this key is kept. At most
        PROGRAMS_MAX programs are kept.

        Later steps get the same object. Measurements of user code's memory are discarded when a new Program
        is made (`Program.made_count`).
        """
        if key not in self.programs:
            while len(self.programs) >= PROGRAMS_MAX:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = Program(schedule())
        return self.programs[key]
