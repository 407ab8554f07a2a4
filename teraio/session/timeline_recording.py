"""The timeline of a run, which the engine's recorder collects. It is written to a file during the run and at
its end.

A step is whole if all of its transfers have ended. Writing delays the training. So the recording writes the
first whole step, the first planned step, and at the end of the run the last step. Between these, it writes at
most every 10 s and spends at most 1 % of the time on writing. If a timeline cannot be written, the training
continues.
"""

from __future__ import annotations

import logging
import time

from teraio.errors import TeraioError
from teraio.runtime.engine.engine import Engine
from teraio.runtime.ledger.recorder import Recorder
from teraio.session.log_lines import add_trace_artifact, rank

log = logging.getLogger("teraio")

REST_PARTS = 100  # writing takes at most 1/100 of the time
REST_MIN_S = 10.0


class Recording:
    """The writer of the timeline file of one session."""

    def __init__(self, engine: Engine, path: str) -> None:
        residency = engine.residency
        self.path = path
        self.recorder = Recorder(residency.budget_bytes, residency.reserve_bytes, self.write_if_due)
        engine.attach_recorder(self.recorder)
        self.due_s = 0.0
        self.planned = False  # True after a planned step was written
        self.warned = False

    def write_if_due(self) -> None:
        step = self.recorder.complete
        first = step is not None and step.rank[1] and not self.planned
        if first or time.monotonic() >= self.due_s:
            self.write()

    def write(self, ended: bool = False) -> None:
        """Write the last step whose transfers have all ended.

        If `ended`, the run has ended and no transfer is in flight. The latest step may then be written, too.
        """
        began_s = time.monotonic()
        try:
            step, line = self.recorder.last_whole_step(ended), self.recorder.timeline(ended)
            if line is not None:
                add_trace_artifact("teraio_timeline", line.dumps)
                if rank() == 0:  # only one process of a distributed training writes the file
                    line.write(self.path)
                self.planned = step is not None and step.rank[1]
            elif step is not None:
                self._warn_once("a step has more kernels and transfers than a timeline file holds")
            elif ended:
                self._warn_once("no step was whole")
        except TeraioError as error:
            self._warn_once(str(error))
        now_s = time.monotonic()
        self.due_s = now_s + max(REST_MIN_S, REST_PARTS * (now_s - began_s))

    def _warn_once(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            log.warning("teraio: the timeline was not written: %s", why)
