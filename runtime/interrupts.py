"""Ctrl-C in the middle of an optimizer's step waits for its end, so that weights and states are those of a
whole step. While the engine itself runs, it waits until that is done: between the emptying of a storage and
the note that it is empty there is no good moment. Wherever it comes, weights wear the guard afterwards:
Dynamo may have taken it off for a program that now does not run. Pressed once more, it waits for nothing."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import sysconfig
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType

import torch

log = logging.getLogger("teraio")


OURS = os.path.dirname(os.path.realpath(__file__)) + os.sep
# They are called by the engine, or by a program, or by user code: who called them decides.
LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, sysconfig.get_path("stdlib") + os.sep)
AGAIN_S = 0.001


class Interrupts:
    def __init__(self) -> None:
        self.guard: Callable[[], None] = lambda: None  # puts it on all weights
        self.waiting = False  # for the engine; a reminder is on its way
        self.reminded = False  # the signal that comes is the reminder
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
        reminded, self.reminded = self.reminded, False
        once_more = (self.late or self.waiting) and not reminded
        self.waiting = False
        # An exception may have ended the step, which no one told us.
        stepping = self.code is not None and runs(self.code, frame)
        if not once_more and stepping:
            self.late = True
            log.warning("teraio: Ctrl-C: after this step of the optimizer")
        elif not once_more and _in_engine(frame):
            self.waiting = True
            _thread.start_new_thread(self._remind, ())
        else:
            self.guard()
            signal.default_int_handler(number, frame)

    def _remind(self) -> None:
        time.sleep(AGAIN_S)
        if self.waiting:
            self.reminded = True
            _thread.interrupt_main(signal.SIGINT)


def runs(code: CodeType | None, frame: FrameType | None) -> bool:
    """Whether this frame, or one that called it, executes the code."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _in_engine(frame: FrameType | None) -> bool:
    """Whether the engine is at work, and not a program or user code that it has called."""
    while frame is not None:
        file = frame.f_code.co_filename
        if os.path.realpath(file).startswith(OURS):
            return True
        if not file.startswith(LIBRARIES):
            return False
        frame = frame.f_back
    return False


INTERRUPTS = Interrupts()
