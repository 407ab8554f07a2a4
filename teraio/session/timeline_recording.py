"""The timeline of a run, from the engine's recorder to a file: now and then while it runs, and at its end.

Writing takes time that the training does not have: the first whole step is written at once, later ones when
the last writing was long enough ago, and the last one when everything ends. A timeline that cannot be written
is no reason to end a training.
"""

from __future__ import annotations

import logging
import time

from teraio.errors import TeraioError
from teraio.runtime.engine.engine import Engine
from teraio.runtime.ledger.recorder import Recorder
from teraio.session.log_lines import add_trace_artifact, rank

log = logging.getLogger("teraio")

REST_PARTS = 100  # writing takes at most one part in so many of the time
REST_MIN_S = 10.0


class Recording:
    def __init__(self, engine: Engine, path: str) -> None:
        residency = engine.residency
        self.path = path
        self.recorder = Recorder(residency.budget_bytes, residency.reserve_bytes)
        self.recorder.on_complete = self.write_if_due
        engine.attach_recorder(self.recorder)
        self.due_s = 0.0
        self.planned = False  # the step in the file is
        self.said = False

    def write_if_due(self) -> None:
        step = self.recorder.complete
        first = step is not None and step.rank[1] and not self.planned
        if first or time.monotonic() >= self.due_s:
            self.write()

    def write(self, ended: bool = False) -> None:
        """`ended`: nothing is under way any more, so that the last step is whole, too."""
        began_s = time.monotonic()
        try:
            step, line = self.recorder.last_whole_step(ended), self.recorder.timeline(ended)
            if line is not None:
                add_trace_artifact("teraio_timeline", line.dumps)
                if rank() == 0:  # one file, one writer
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
        if not self.said:
            self.said = True
            log.warning("teraio: the timeline was not written: %s", why)
