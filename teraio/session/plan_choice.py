"""The choice of one plan as a sequence of questions to the planner. Steps go on while the planner works.

    Ask       one question: a function of the planners with its arguments
    Work      a generator that yields asks, receives their answers, and returns the choice
    Choice    runs a Work: it starts a planner process for each ask, or runs the ask in this process

A generator is suspended at each ask. So the session advances a choice at the end of a step, if the planner
has answered by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from teraio.errors import TeraioError
from teraio.formats.plan import Plan
from teraio.passes.planner.planner_process import PlannerProcess
from teraio.progress import show_stage

log = logging.getLogger("teraio")


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the planner: its text for log lines, and the call that answers it."""

    what: str
    limit_s: float
    call: partial[Any]


Returned = TypeVar("Returned")
Work = Generator[Ask, Any, Returned]


class Choice:
    """A choice that is being made.

    With `beside`, each ask runs in a process of its own. Otherwise the first call of `has_ended` waits for
    the whole choice.
    """

    def __init__(self, work: Work[Plan | None], beside: bool) -> None:
        self._work, self._beside = work, beside
        self._begun = self._ended = self._waits = False
        self._plan: Plan | None = None
        self._ask: Ask | None = None
        self._running: PlannerProcess | None = None  # the process that answers `_ask`

    @property
    def is_over(self) -> bool:
        """Return True if the choice has ended, with or without a plan."""
        return self._ended

    def has_ended(self) -> bool:
        """Advance the choice as far as possible without a wait for a process. Return True if it has ended."""
        self._advance(waits=False)
        return self._ended

    def finish(self) -> Plan | None:
        """Wait until the choice has ended, and return its plan."""
        self._advance(waits=True)
        return self._plan

    def cancel(self) -> None:
        """End the choice and its process, without a plan."""
        self._ended = True
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
        self._work.close()

    def _advance(self, waits: bool) -> None:
        """Run the choice until it ends or, unless `waits`, until it needs an answer that is not there."""
        self._waits = waits
        try:
            if not self._begun:
                self._begun = True
                self._resume(partial(next, self._work))
            while not self._ended and (waits or self._running is None or self._running.has_ended()):
                self._resume_with_answer()
        except BaseException:  # Ctrl-C, or a bug
            self.cancel()
            raise

    def _resume_with_answer(self) -> None:
        """Wait for the answer to the current ask. Then run the choice until its next ask or its end."""
        try:
            answer = self._answer()
        except TeraioError as error:
            self._resume(partial(self._work.throw, error))
        else:
            self._resume(partial(self._work.send, answer))

    def _answer(self) -> Any:
        assert self._ask is not None
        with show_stage(self._ask.what, limit_s=self._ask.limit_s, say=log.info):
            if self._running is None:
                return self._ask.call()
            answer = self._running.result()
            self._running = None
            return answer

    def _resume(self, until_next_ask: Callable[[], Ask]) -> None:
        try:
            self._ask = until_next_ask()
        except StopIteration as end:
            self._ended, self._plan = True, end.value
            return
        if self._beside:
            self._start_process(self._ask)

    def _start_process(self, ask: Ask) -> None:
        try:
            self._running = PlannerProcess(ask.call, ask.limit_s)
        except Exception as error:  # noqa: BLE001  whatever prevents the process, this process can plan
            self._beside = False
            _warn_that_steps_wait(str(error))
            return
        log.info(
            "teraio: %s in a process of its own, at most %.0f s; %s",
            ask.what,
            ask.limit_s,
            "the training waits" if self._waits else "steps go on meanwhile",
        )


@cache
def _warn_that_steps_wait(reason: str) -> None:
    log.warning("teraio: no process for the planner (%s): the next step waits for each plan", reason)
