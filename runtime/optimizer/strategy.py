"""What is known of an optimizer: how it may be stepped, and the programs that its steps are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from teraio import switches
from teraio.formats.schedule import Schedule

from ..step.program import Program
from . import trial

log = logging.getLogger("teraio")

# Of the budget, in parameters of one bucket: with gradients, states and temporaries a tenth.
BUDGET_PARTS = 64
BUCKET_MIN_BYTES, BUCKET_MAX_BYTES = 64 * 2**10, 32 * 2**20
PROGRAMS_MAX = 16

TRYING: list[torch.optim.Optimizer] = []  # on clones, whose steps are not ours


@contextmanager
def mark_on_trial(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    TRYING.append(optimizer)
    try:
        yield
    finally:
        TRYING.pop()


class Strategy:
    """What is known of one optimizer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen = trial.Outcome(None)
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.asked: tuple[Any, ...] | None = None
        self.met = 0  # how many of its parameters were looked at, whether eager code alone uses them
        self.by_rows: bool | None = None  # whether a parameter may be stepped in slices
        self.in_buckets = False  # the user insists
        self.limit_bytes = 0
        self.said: set[str] = set()

    def bucket_limit_bytes(self, budget_bytes: int) -> int:
        """How large its buckets may be. Another budget changes nothing: the step would be another one."""
        if not self.limit_bytes:
            self.limit_bytes = min(max(budget_bytes // BUDGET_PARTS, BUCKET_MIN_BYTES), BUCKET_MAX_BYTES)
        return self.limit_bytes

    def run_trial_if_changed(self, optimizer: torch.optim.Optimizer) -> None:
        """Once, and again when its groups have become others, or a rule of its own was switched on."""
        if trial.trial_key(optimizer, self.seen.counts) != self.asked:
            self.by_rows = None
            with mark_on_trial(optimizer):
                self.seen = self._try_in_buckets(optimizer)
            self.asked = trial.trial_key(optimizer, self.seen.counts)

    def _try_in_buckets(self, optimizer: torch.optim.Optimizer) -> trial.Outcome:
        if "buckets" in switches.disabled_features():
            seen = trial.Outcome(f"{switches.VARIABLE} names buckets")
        else:
            seen = trial.try_in_buckets(optimizer)
        if seen.reason is not None:
            self.warn_of_whole_step(optimizer, seen.reason)
        return seen

    def warn_of_whole_step(self, optimizer: torch.optim.Optimizer, reason: str) -> None:
        """Once per reason."""
        if reason not in self.said:
            self.said.add(reason)
            log.warning(
                "teraio: %s steps all of its parameters at once (%s): all gradients and states are in memory "
                "then",
                type(optimizer).__name__,
                reason,
            )

    def can_step_by_rows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Asked where nothing else fits."""
        if self.by_rows is None:
            with mark_on_trial(optimizer):
                self.by_rows = trial.can_step_by_rows(optimizer)
            if self.by_rows:
                log.info(
                    "teraio: %s steps its largest parameters some rows at a time: whole, with what their "
                    "update holds besides, they do not fit",
                    type(optimizer).__name__,
                )
        return self.by_rows

    def cached_program(self, key: tuple[Any, ...], schedule: Callable[[], Schedule]) -> Program:
        """The same object each time: a step is recognised by the programs that run in it."""
        if key not in self.programs:
            while len(self.programs) >= PROGRAMS_MAX:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = Program(schedule())
        return self.programs[key]
