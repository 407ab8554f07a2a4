"""Ctrl-C in the middle of an optimizer's step waits for its end, so that weights and states are those of a
whole step. Pressed once more, it waits for nothing."""

from __future__ import annotations

import logging
import signal
import threading
from types import CodeType, FrameType

log = logging.getLogger("teraio")


class Interrupts:
    def __init__(self) -> None:
        self.code: CodeType | None = None  # of the step that is between its first bucket and its end
        self.late = False  # one came meanwhile

    def install(self) -> None:
        """Where Python's own answer to Ctrl-C is in place, and only there."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._pressed)

    def remove(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) == self._pressed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def begin(self, code: CodeType | None) -> None:
        self.code, self.late = code, False

    def end(self) -> None:
        """The step is whole."""
        self.code = None
        if self.late:
            self.late = False
            raise KeyboardInterrupt

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        # An exception may have ended the step, which no one told us.
        if self.late or self.code is None or not runs(self.code, frame):
            signal.default_int_handler(number, frame)
        self.late = True
        log.warning("teraio: Ctrl-C: after this step of the optimizer")


def runs(code: CodeType | None, frame: FrameType | None) -> bool:
    """Whether this frame, or one that called it, executes the code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


INTERRUPTS = Interrupts()
