"""Loggers that write the figures of each step. In: the ends of optimizer steps. Out: calls of `write`.

torch calls a global hook after each optimizer step. teraio's own hook runs first, so that `teraio.stats()`
has counted the step. Several optimizers may step in one step. So a step is written when the next step has
begun to show, and the last step at `close`. A step is written only once.

A failure of the logger never ends the training: a log line reports the failure, and the writer stops.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from teraio.session import session

from .metrics import scalars
from .report_page import Report, RunFiles

log = logging.getLogger("teraio")


class StepWriter:
    """The base of loggers that write each step. A subclass defines `write`, and may define
    `write_report`.

    The writer begins when it is made, and ends at `close` or at the end of its `with` block.
    """

    NAME = ""  # the logger's name in log lines

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; it is a number of steps, at least 1")
        self.every = every
        self.step = 0  # the number of the last step
        self.pending: Mapping[str, Any] = {}  # the figures of the last step, which may still change
        self.files = RunFiles()
        session.patch_torch()  # teraio's own hook must be registered before this one
        self.hook = register_optimizer_step_post_hook(self._note_step)
        self.is_open = True

    def write(self, step: int, figures: Mapping[str, int | float]) -> None:
        """Write the figures of one step."""
        raise NotImplementedError

    def write_report(self, step: int, report: Report) -> None:
        """Write the report of the run's timeline. A logger without a place for reports does nothing."""

    def close(self) -> None:
        """Write the last step and the report, and end the writer. A second call does nothing."""
        if not self.is_open:
            return
        self._note_step()
        if self.is_open:
            self._attempt(self._finish)
        self._end()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _note_step(self, *call: Any) -> None:
        """Note the figures of the step that an optimizer has ended, and write the step before."""
        step = _last_step()
        if not self.is_open or not step:
            return
        self.files.note_paths()
        if self.step != step:
            self._attempt(self._write_pending)
        self.step = step
        if step % self.every == 0:  # on a GPU, this waits for the end of the step
            self.pending = session.stats()

    def _write_pending(self) -> None:
        figures, self.pending = self.pending, {}
        if figures:
            self.write(self.step, scalars(figures))

    def _finish(self) -> None:
        self._write_pending()
        report = self.files.report()
        if isinstance(report, Report):
            self.write_report(self.step, report)
        elif report:
            log.warning("teraio: no report page: %s", report)

    def _attempt(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  the logger of another library may raise anything
            log.warning(
                "teraio: %s failed: %s: %s; no further steps are written to it",
                self.NAME,
                type(error).__name__,
                error,
            )
            self._end()

    def _end(self) -> None:
        self.is_open = False
        self.hook.remove()


def _last_step() -> int:
    """Return the number of the last step, or 0. Unlike `teraio.stats()`, this waits for no GPU."""
    running = session.SESSION
    return running.engine.meter.last.figures.get("step", 0) if running is not None else 0
